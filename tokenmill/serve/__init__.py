"""The HTTP edge: an OpenAI-compatible server on an engine in a process of its own."""
