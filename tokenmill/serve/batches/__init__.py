"""Batches: many requests from one file, answered beside live traffic, resumed after a kill."""
