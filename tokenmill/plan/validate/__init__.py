"""Predicted against measured: rows of real deployments, and how far the cost model is from them."""
