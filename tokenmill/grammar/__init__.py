"""Grammars for structured output: the text of a grammar (source.py), the tokens (vocabulary.py), compilation off the
hot path (compiler.py). The sampler uses them through features/grammar.py."""
