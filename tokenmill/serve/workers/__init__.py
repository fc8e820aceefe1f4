"""Text work that a client controls (templates, long texts, grammars), done in child processes that can be killed."""
