"""Measurements of a model's quality."""
