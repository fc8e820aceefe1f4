"""Statistics of a layer's keys and queries for rounding keys well: centers, scales, how queries weigh errors.

Rows hold (key - center) * scale, rotated. A center shifts all scores of a query equally, which does not change the
softmax; queries are divided by the scale. Coordinates are rounded one after the other, and later ones compensate for
the error so far as weighted by the queries (LDLQ): this minimizes the error of scores, not of keys. Reading a row needs
nothing of this but the scale. Measured by runtime/observation/key_conditioning.py, applied by row formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.model.kvstore.rotation import Rotation

_RIDGE = 0.03  # relative to the mean energy: regularization, because few tokens were measured


@dataclass(frozen=True, slots=True, eq=False)
class KeyConditioning:
    """Of one layer."""

    center: Tensor  # float32 [kv_heads, head_dim]
    scale: Tensor  # float32 [kv_heads, head_dim]
    query_moment: Tensor  # float64 [kv_heads, head_dim, head_dim]: E[q q^T]

    def centered(self) -> KeyConditioning:
        """For rounding without feedback: the scales suit rounding with it, and alone they do harm."""
        return replace(self, scale=torch.ones_like(self.scale))

    def feedback(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """float32 [kv_heads, head_dim, head_dim], strictly lower: coordinate i should be rounded from y_i less the sum
        of feedback[i, j] * error_j over j < i; and what is lost by doing so, weights [kv_heads, head_dim] of squares.

        With E[q q^T] = M^T D M, M unit lower triangular, the error of scores is sum_i D_i (error_i + (M error)_i)^2."""
        inverse = 1 / self.scale.double()
        moment = self.query_moment * inverse[:, :, None] * inverse[:, None, :]
        moment = rotation.rotate(rotation.rotate(moment).transpose(1, 2))  # in the coordinates that are rounded
        energy = moment.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
        moment = moment + _RIDGE * energy[:, None, None] * torch.eye(moment.shape[1], dtype=moment.dtype)
        upper = torch.linalg.cholesky(moment.flip(1, 2)).flip(1, 2)
        pivots = upper.diagonal(dim1=1, dim2=2)
        lower = (upper / pivots[:, None]).transpose(1, 2)
        return lower.tril(-1).float().contiguous(), (pivots.square() / energy[:, None]).float()
