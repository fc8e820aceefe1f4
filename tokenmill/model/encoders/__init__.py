"""Encoders: bidirectional models that compute a whole text at once and keep nothing.

packed.py     texts of any lengths as one row of tokens, sorted so that those of one length lie together
weights.py    a checkpoint's tensors under canonical names, joined as the products want them
encoder.py    the forward pass, by the facts of an EncoderDescription
attention.py  attention within each text of a packed batch: grouped by length, or one kernel on a GPU
pooling.py    token states -> one vector for each text; dense layers; heads of classifiers
"""
