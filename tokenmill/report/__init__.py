"""Reports as one HTML file: SVG charts, the page around them, Pareto fronts. No script, nothing from the net.

Shared by `plan`, `simulate`, `optimize` and `bench`; knows nothing of what the figures mean.
"""
