"""What a measuring step hands over of each layer: by the ops of the host (key_conditioning.py) or of a GPU
(device_conditioning.py), to whoever measures (key_conditioning.py, head_samples.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.layers.rotary import RotaryTable

# Takes a layer's queries, keys and values, float32 [T, heads, head_dim], the first two before rotary positions, and the
# tables of these.
Add = Callable[[AttentionSpec, Tensor, Tensor, Tensor, tuple[RotaryTable | None, RotaryTable | None]], None]
