"""Programs that look at the repository itself; the package does not import them."""
