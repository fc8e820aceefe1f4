"""Routes and the shapes of their bodies: OpenAI, Anthropic, Ollama, and what the server says of itself."""
