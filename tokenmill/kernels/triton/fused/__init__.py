"""Elementwise work, fused so that activations are read and written once.

  elementwise.py      norms, gates, sums, soft caps, embeddings, with an optional 8-bit copy for the next product
  rotary.py           rotary positions, and in the same pass keys and values into dense or FP8 pages
  rotary_packed.py    the same into quantized pages
  rotary_epilogue.py  the same as the epilogue of a product of few tokens (matmul/); `GpuLinear.rotates` says when
  draft_inputs.py     hidden state and token embedding side by side, for draft heads

Nothing to choose but the kind of pages: `rope_store` or `rope_store_packed`; `head_places` where the product rotates.
"""
