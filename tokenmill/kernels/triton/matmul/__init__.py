"""Weights on the GPU, and their products with activations [tokens, depth].

  linear.py        `GpuLinear`: bf16, a scale per row (fp8, int8), or grouped codes; calling one multiplies
  choose.py        which kernel for a kind, shape and token count, by rule or by measurement: its table is the rule
  gemv.py          one token, bf16, fp8 or int8
  grouped_gemv.py  one token, 4-bit groups
  skinny.py        few tokens, bf16, fp8 or int8, on the tensor cores
  grouped.py       4- and 8-bit groups, any number of tokens; `GroupedWeight`, the layout of all grouped kernels
  w4a8.py          grouped codes whose input is rounded to float8: `RoundedGroupedLinear`
  grouped_fp8.py   their product on FP8 tensor cores
  hopper/          4-bit groups with 65 to 512 tokens on Hopper, in Gluon
  dequantize.py    grouped codes as bf16, for the vendor's library
  tile.py          device functions that these share
  repack.py        stored weights (GGUF blocks, GPTQ, AWQ ...) -> GroupedWeight
  joined.py        matrices that share an input as one; small ones as bf16

Make a weight with `make_linear`, `from_quantized` or `quantize_at_load` and call `multiply`; it asks choose.py.
"""
