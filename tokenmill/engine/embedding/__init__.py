"""Embedding and reranking models: the offline face, and the engine of encoders.

embedder.py  Embedder: texts in, vectors or scores out, in one process, for encoders and causal models
inputs.py    texts and pairs -> token ids, as the model wants them: prompts, cuts, templates of rerankers
core.py      EncoderCore: the queue and the step of an encoder, in the place of scheduler and runner
build.py     an encoder put together from its files
"""
