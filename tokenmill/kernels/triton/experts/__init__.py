"""Mixtures of experts: which experts a token goes to, and the products with their matrices.

  layer.py    `GpuExperts`: all of the following for one layer, by the plan of choose.py
  choose.py   which kernel, cut up how, for a kind of weights and a number of tokens: its table is the rule
  stack.py    `GpuExpertStack`: the matrices of all experts as one tensor: bf16, fp8, int4, mxfp4
  route.py    router logits -> experts of each token and their weights
  order.py    assignments sorted by expert, and the table of blocks that the products take
  product.py  products on the tensor cores, any number of tokens, with activation and weighting
  unpack.py   4-bit codes as operands, in registers
  gemv.py     products of a few tokens without tensor cores: bf16, fp8
  host.py     `HostExperts`: experts in host memory, copied into slots on the GPU or computed on the host
  residency.py  which experts are in the slots, and which make room
  rows.py     float8 in groups of 128; the sum over a token's experts

Make stacks with `bf16_stack`, `fp8_stack`, `int4_stack` or `mxfp4_stack`, a `GpuExperts` of two of them, and call it.
"""
