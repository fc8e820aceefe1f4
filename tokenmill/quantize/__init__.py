"""Quantization: recipes of methods applied block by block, written in any format, proven before they are kept."""
