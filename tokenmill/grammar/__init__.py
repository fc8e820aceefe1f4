"""Grammars for structured output: what a spec means (source.py), over which tokens (vocabulary.py), made ready off the
hot path (compiler.py). The sampler meets them through features/grammar.py."""
