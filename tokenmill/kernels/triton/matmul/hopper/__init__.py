"""Products of 4-bit groups with 65 to 512 tokens on Hopper, in Gluon: weights are unpacked beside the tensor cores.

  narrow.py         tiles of 256 rows x 128 tokens; every warp unpacks and multiplies
  wide.py           tiles of 128 rows x 256 tokens; one warp copies, two groups of four unpack and multiply by turns
  wide_epilogue.py  what wide.py does with a finished tile, or with its part of one
  unpack.py         nibbles -> 16-bit weights in registers, for both

choose.py of the folder above says which for how many tokens. Imported only where `on_hopper()`.
"""
