"""What is wrong with a running server, told from its metrics: ours, vLLM's or llama.cpp's."""
