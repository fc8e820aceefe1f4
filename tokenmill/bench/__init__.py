"""Measurements of the engine on synthetic work."""
