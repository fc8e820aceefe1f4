"""Search by meaning: the sentence nearest to each question, by the vectors of an embedding model.

python examples/semantic_search.py [MODEL]
"""

import sys

from tokenmill import Embedder

MODEL = sys.argv[1] if len(sys.argv) > 1 else "minilm"
SENTENCES = [
    "The train to Berlin leaves at noon.",
    "Bread is baked from flour, water and yeast.",
    "The moon pulls at the sea and makes the tides.",
]
QUESTIONS = ["How do I make dough?", "Why does the ocean rise and fall?"]

with Embedder(MODEL) as embedder:
    vectors = embedder.embed(SENTENCES + QUESTIONS)  # of length one: a product of two is their cosine
    likeness = vectors[len(SENTENCES) :] @ vectors[: len(SENTENCES)].T
    for question, row in zip(QUESTIONS, likeness, strict=True):
        print(f"{question} -> {SENTENCES[row.argmax()]} ({row.max():.2f})")
