"""What draft heads share with their target: its embedding, final norm and output head.

Heads guess hidden states; this turns tokens into such states and states into tokens. Knows nothing of drafts.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.model.loader import LoadedModel


class TargetVocabulary:
    """The target's embedding, final norm and output head: between tokens and hidden states."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._decoder = model.decoder
        self._table = model.table

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.embed(token_ids) * self._decoder.description.embedding_scale

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """([T] probability, [T] id) of the most likely token."""
        chances, ids = self.top(hidden, 1)
        return chances[:, 0], ids[:, 0]

    def top(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """([T, count] probability, [T, count] id) of the most likely tokens."""
        return self.top_of_normed(self.normed(hidden), count)

    def normed(self, hidden: Tensor) -> Tensor:
        """Float32, behind the final norm."""
        return self._decoder.norm.of_tensor(hidden.float())

    def top_of_normed(self, normed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        kernel = self._decoder.head.kernel
        assert kernel is not None, "the head is always multiplied"
        x = normed if self._table is None else normed.to(self._table.dtype)
        logits = kernel.run(x.contiguous())[:, : self._decoder.description.vocab_size].float()
        values, ids = logits.topk(count)
        return (values - logits.logsumexp(-1, keepdim=True)).exp(), ids
