"""What the kernels of every room share. Rooms import from here and from nowhere else but their own folder.

  launch.py        host side: launch keywords (programmatic dependent launch), scratch memory, device generation, sizes
  device.py        @triton.jit functions: dependent launch, split sums, page and sequence lookup, row rotation
  gluon_device.py  the same for Gluon kernels (Hopper only; importing it needs a Triton with Gluon)

The one exception: `fused/rotary_epilogue.py` is written for products and used by matmul/, since rotary positions and
KV pages are its subject.
"""
