"""Quantization: recipes of methods applied block by block, written in any format, checked by a quality gate."""
