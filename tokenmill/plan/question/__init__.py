"""What is asked: models and their matrices, workload, engines, prices, limits; one deployment and its memory.

Records and range checks. Knows nothing of time; everything above reads these types.
"""
