"""Draft heads trained for a target (`tokenmill train-draft`): guesses from its last hidden state, no second model.

Owns the hidden state of each sequence's last computed token, which the runner hands over after every step; a sequence
whose state is not of its last token (after preemption) gets no draft until the next one. `--speculate head:DIR`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor

from tokenmill.errors import CheckpointError, UserError
from tokenmill.kernels.ref import rms_norm
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import Draft, StepGuesser
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.head_modules import HEAD_KINDS, Attend, EagleHead, MedusaHeads, build_head
from tokenmill.runtime.speculation.page_views import PageViews
from tokenmill.types import Request, ScheduledTokens

CONFIG_FILE, WEIGHTS_FILE = "draft_head.json", "draft_head.safetensors"
FORMAT = 2
_UNKNOWN = 0.5  # confidence of guesses that came without one


class HeadDrafter(Drafter):
    name = "head"
    computes = True
    needs_hidden = True

    def __init__(self, head: MedusaHeads | EagleHead, model: LoadedModel, store: KVStore) -> None:
        self.head = head.to(model.device).eval().requires_grad_(False)
        self.words = Words(model)
        self.views = page_views(head, model, store)
        self.states: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()
        self._taken: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()

    @classmethod
    def build(cls, argument: str, target: Target) -> HeadDrafter:
        if not argument:
            raise UserError("--speculate head names no directory", "write --speculate head:DIR, made by train-draft")
        return cls(load_head(Path(argument), target.model), target.model, target.store)

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.head.parameters())

    def observe(self, row: ScheduledTokens, num_accepted: int, hidden: Tensor) -> None:
        """`hidden` [hidden]: of the token whose logits chose the last one. Kept as it is: the caller gives a copy."""
        self.states[row.request] = (row.start + row.count + num_accepted + 1, hidden)

    def step_guesser(self, target: Target) -> StepGuesser | None:
        if target.model.table is None:  # weights of the CPU
            return None
        from tokenmill.runtime.speculation.captured_heads import CapturedHead

        return CapturedHead(self.head, target.model, target.store, target.config.draft_tokens)

    def take(self, row: ScheduledTokens, num_accepted: int, token_ids: list[int]) -> None:
        self._taken[row.request] = (row.start + row.count + num_accepted + 1, token_ids)

    def ready(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[int]:
        """The rows whose state is that of their last token."""
        lengths = [self.states.get(row.request, (0, None))[0] for row in rows]
        return [n for n, row in enumerate(rows) if limits[n] and lengths[n] == row.request.num_tokens]

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = [self._at_hand(row.request, limit) for row, limit in zip(rows, limits, strict=True)]
        ready = [number for number in self.ready(rows, limits) if not drafts[number].token_ids]
        if not ready:
            return drafts
        hidden = torch.stack([self.states[rows[number].request][1] for number in ready]).float()
        depth = min(self.head.depth, max(limits[number] for number in ready))
        last = torch.tensor([rows[number].request.token_ids[-1] for number in ready], device=hidden.device)
        attend = None if self.views is None else self.views.look(self.views.batch([rows[number] for number in ready]))
        ids, chances = self.guess(hidden, last, depth, attend)
        for number, own_ids, own_chances in zip(ready, ids, chances, strict=True):
            drafts[number] = Draft(own_ids[: limits[number]], own_chances[: limits[number]])
            # Where drafts are checked whole (`step_guesser`) the place that looked up ones could fill is filled anyhow.
            missing = min(self.guessed_depth, limits[number]) - len(drafts[number].token_ids)
            drafts[number].token_ids += own_ids[-1:] * missing
            drafts[number].confidences += own_chances[-1:] * missing
        return drafts

    def _at_hand(self, request: Request, limit: int) -> Draft:
        """What the last step guessed, if it is of the request's last token."""
        length, ids = self._taken.get(request, (0, []))
        if length != request.num_tokens:
            return Draft()
        return Draft(ids[:limit], [_UNKNOWN] * len(ids[:limit]))

    def guess(
        self, hidden: Tensor, last: Tensor, depth: int, attend: Attend | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """[rows][depth] tokens and their probabilities."""
        if isinstance(self.head, MedusaHeads):
            guessed = self.head(hidden)[:, :depth]
            chances, ids = self.words.best(guessed.flatten(0, 1))
            shape = guessed.shape[:2]
            return ids.view(shape).tolist(), chances.view(shape).tolist()
        steps = []
        for _ in range(depth):
            hidden = self.head(hidden, self.words.embed(last), attend)
            chances, last = self.words.best(hidden)
            steps.append((last, chances))
        ids = torch.stack([each for each, _ in steps], dim=1)
        return ids.tolist(), torch.stack([each for _, each in steps], dim=1).tolist()


class Words:
    """The target's embedding, final norm and head: between hidden states and tokens."""

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
        normed = rms_norm(hidden.float(), self._decoder.norm, self._decoder.description.norm_eps)
        kernel = self._decoder.head.kernel
        assert kernel is not None, "the head is always multiplied"
        x = normed if self._table is None else normed.to(self._table.dtype)
        logits = kernel.run(x.contiguous())[:, : self._decoder.description.vocab_size].float()
        values, ids = logits.topk(count)
        return (values - logits.logsumexp(-1, keepdim=True)).exp(), ids


def page_views(head: MedusaHeads | EagleHead, model: LoadedModel, store: KVStore) -> PageViews | None:
    """What the head looks at; None where it does not."""
    if not head.layers:
        return None
    if model.table is None:  # weights of the CPU
        return PageViews(model, store, head.layers)
    from tokenmill.runtime.speculation.captured_views import CapturedViews

    return CapturedViews(model, store, head.layers)


def load_head(folder: Path, model: LoadedModel) -> MedusaHeads | EagleHead:
    remedy = "make one with tokenmill train-draft"
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE} and {WEIGHTS_FILE}", remedy)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        kind, depth, width = config["kind"], int(config["depth"]), int(config["width"])
        layers = tuple(int(layer) for layer in config.get("layers", ()))
        fingerprint, version = config["target"], config["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} cannot be read ({error})", remedy) from error
    if version not in (1, FORMAT) or kind not in HEAD_KINDS:  # 1 knew no layers
        raise CheckpointError(f"{folder} holds a head of kind '{kind}', format {version}, not known here", remedy)
    if fingerprint != target_fingerprint(model):
        raise UserError(f"the head in {folder} was trained for another model: {fingerprint}", remedy)
    d = model.decoder.description
    if not set(layers) <= {layer for layer, name in enumerate(d.layer_kinds) if name == "full"}:
        raise CheckpointError(f"the head in {folder} looks at layers {layers}, which do not keep all keys", remedy)
    head = build_head(kind, d.hidden_size, depth, width, layers, d.num_heads * d.head_dim)
    try:
        head.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except Exception as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} does not fit its config ({error})", remedy) from error
    return head


def target_fingerprint(model: LoadedModel) -> str:
    """What a head must agree with its target in. Another rounding of the same model still fits."""
    d = model.decoder.description
    return f"{d.architecture}/{d.num_layers}x{d.hidden_size}/{d.vocab_size}"
