"""Adapters (LoRA, DoRA) of rows in any mixture, added to a product.

  site.py      `GpuSite`: the adapters of one product, in slots whose memory never moves
  products.py  shrink (x A^T, depth split over programs) and expand (B, added to the output in place)

A program takes the rows of one slot in one tile of tokens, so a factor is read once for all rows that share it, rows
need not be sorted, and programs of a slot without rows end at once. Which rows have which adapter is read on the
device: a captured step holds for every mixture. Steps without any adapter are captured without these launches.
"""
