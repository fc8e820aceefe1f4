"""Several models in one server: which there are, what they need, which of them are loaded."""
