"""Deploy: from a plan to launch lines and manifests, for this engine and others. One file per engine in `engines/`."""
