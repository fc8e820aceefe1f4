"""Choosing tokens from logits; see sampler.py."""
