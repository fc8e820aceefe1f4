"""Files that clients upload and that batches write: on disk, by owner, within a bound."""
