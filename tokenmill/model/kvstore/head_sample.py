"""What a KV store with measured codes is told of a layer: keys and values of real text, and how queries weigh errors.

Measured by runtime/observation/head_samples.py before anything is stored; stores keep what they work out, not this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.model.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True, eq=False)
class HeadSample:
    """Of one layer, on the host. Keys are as they were before rotary positions."""

    keys: Tensor  # float32 [N, kv_heads, head_dim]
    value_mean: Tensor  # float32 [kv_heads, head_dim]
    # Of first tokens [M, kv_heads, head_dim]: attention sinks, unlike all others. Row 0 is of the token that begins
    # every text of the model, where there is one (`begins`).
    first_keys: Tensor
    first_values: Tensor
    begins: bool
    query_moment: Tensor  # float64 [kv_heads, head_dim, head_dim]: E[q q^T] as queries some way behind meet a key
    rotary: RotaryTable | None  # of the keys, on the model's device; None: they are not rotated
