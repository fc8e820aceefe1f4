"""Attention over paged keys and values.

  dense.py, dense_kernel.py    bf16, float16, float32 and FP8 pages: decode, prefill, mixed steps, a shared prefix
  packed.py, packed_kernel.py  quantized pages (int8, int4, codebooks; kernels/packed_pages.py): decode, prefill, mixed
  hopper.py                    many rows over bf16 or float16 pages on Hopper, warp-specialised, in Gluon
  encoder.py                   whole texts without pages, in both directions, packed without padding
  fp8_widening.py              FP8 values and pages as 16-bit floats
  online_softmax.py            the running softmax of a program, and merging the parts of several
  arguments.py                 argument bundles of the kernels
  choose.py                    which of these for a shape, with which tiles and splits: its table is the rule

Call `paged_attention` or `packed_attention`, by the kind of pages; nothing else has to be chosen.
"""
