"""Building blocks shared by architectures."""
