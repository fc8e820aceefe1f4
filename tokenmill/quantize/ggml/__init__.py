"""Writing ggml's block types: the quantizers, the mixes of a whole file, and the GGUF file itself."""
