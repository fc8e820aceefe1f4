"""The server and offline batches on a Ray cluster, by Ray Serve and Ray Data. Needs the extra `ray`."""
