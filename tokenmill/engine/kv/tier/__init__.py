"""Tiers: where prefix pages go when the KV cache needs their place, and come back from. Nearest first in a stack."""
