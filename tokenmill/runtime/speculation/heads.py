"""Draft heads trained for a target (`tokenmill train-draft`): drafts from its last hidden state, no second model.
Published EAGLE heads, which have keys and values of their own, are handed to layer_drafter.py.

Owns the hidden state of each sequence's last computed token, which the runner passes on after every step; a sequence
whose state is not that of its last token (after preemption) gets no draft until the next step. `--speculate head:DIR`.
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
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import Draft, StepGuesser
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.head_modules import HEAD_KINDS, Attend, EagleHead, MedusaHeads, build_head
from tokenmill.runtime.speculation.page_views import PageViews
from tokenmill.runtime.speculation.target_vocabulary import TargetVocabulary
from tokenmill.types import Request, ScheduledTokens

CONFIG_FILE, WEIGHTS_FILE = "draft_head.json", "draft_head.safetensors"
FORMAT = 2
_DEFAULT_CONFIDENCE = 0.5  # of drafts computed inside a step, which come without one


class HeadDrafter(Drafter):
    name = "head"
    needs_training = True
    computes = True
    needs_hidden = True

    def __init__(self, head: MedusaHeads | EagleHead, model: LoadedModel, store: KVStore) -> None:
        self.head = head.to(model.device).eval().requires_grad_(False)
        self.vocabulary = TargetVocabulary(model)
        self.views = page_views(head, model, store)
        self.states: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()
        self._guesses: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()

    @classmethod
    def build(cls, argument: str, target: Target) -> Drafter:
        if not argument:
            raise UserError("--speculate head needs a directory", "write --speculate head:DIR, made by train-draft")
        from tokenmill.runtime.speculation import eagle_files, layer_drafter

        folder = Path(argument)
        if not (folder / CONFIG_FILE).is_file() and eagle_files.is_published(folder):
            return layer_drafter.LayerDrafter(eagle_files.load_eagle(folder, target), target)
        return cls(load_head(folder, target.model), target.model, target.store)

    @property
    def nbytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.head.parameters())

    def observe(self, row: ScheduledTokens, num_accepted: int, hidden: Tensor) -> None:
        """`hidden` [hidden]: the state whose logits chose the last token. Kept without copying."""
        self.states[row.request] = (row.start + row.count + num_accepted + 1, hidden)

    def step_guesser(self, target: Target) -> StepGuesser | None:
        # On the CPU, or with a final norm that the captured head does not have: drafts are made between steps.
        if target.model.table is None or target.model.decoder.norm.removes_mean:
            return None
        from tokenmill.runtime.speculation.captured_heads import CapturedHead

        return CapturedHead(self.head, target.model, target.store, target.config.draft_tokens)

    def observe_guesses(self, row: ScheduledTokens, num_accepted: int, token_ids: list[int]) -> None:
        self._guesses[row.request] = (row.start + row.count + num_accepted + 1, token_ids)

    def ready(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[int]:
        """The rows whose state is that of their last token."""
        lengths = [self.states.get(row.request, (0, None))[0] for row in rows]
        return [n for n, row in enumerate(rows) if limits[n] and lengths[n] == row.request.num_tokens]

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = [self._precomputed(row.request, limit) for row, limit in zip(rows, limits, strict=True)]
        ready = [number for number in self.ready(rows, limits) if not drafts[number].token_ids]
        if not ready:
            return drafts
        hidden = torch.stack([self.states[rows[number].request][1] for number in ready]).float()
        depth = min(self.head.depth, max(limits[number] for number in ready))
        last = torch.tensor([rows[number].request.token_ids[-1] for number in ready], device=hidden.device)
        attend = (
            None if self.views is None else self.views.attend_fn(self.views.batch([rows[number] for number in ready]))
        )
        ids, chances = self.guess(hidden, last, depth, attend)
        for number, own_ids, own_chances in zip(ready, ids, chances, strict=True):
            drafts[number] = Draft(own_ids[: limits[number]], own_chances[: limits[number]])
            # Where drafts always have the same length (`step_guesser`), which prompt lookup would fill, pad with the
            # last token.
            missing = min(self.guessed_depth, limits[number]) - len(drafts[number].token_ids)
            drafts[number].token_ids += own_ids[-1:] * missing
            drafts[number].confidences += own_chances[-1:] * missing
        return drafts

    def _precomputed(self, request: Request, limit: int) -> Draft:
        """The draft that the last step computed, if it follows the request's last token."""
        length, ids = self._guesses.get(request, (0, []))
        if length != request.num_tokens:
            return Draft()
        return Draft(ids[:limit], [_DEFAULT_CONFIDENCE] * len(ids[:limit]))

    def guess(
        self, hidden: Tensor, last: Tensor, depth: int, attend: Attend | None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """[rows][depth] tokens and their probabilities."""
        if isinstance(self.head, MedusaHeads):
            guessed = self.head(hidden)[:, :depth]
            chances, ids = self.vocabulary.best(guessed.flatten(0, 1))
            shape = guessed.shape[:2]
            return ids.view(shape).tolist(), chances.view(shape).tolist()
        steps = []
        for _ in range(depth):
            hidden = self.head(hidden, self.vocabulary.embed(last), attend)
            chances, last = self.vocabulary.best(hidden)
            steps.append((last, chances))
        ids = torch.stack([step_ids for step_ids, _ in steps], dim=1)
        return ids.tolist(), torch.stack([step_chances for _, step_chances in steps], dim=1).tolist()


def page_views(head: MedusaHeads | EagleHead, model: LoadedModel, store: KVStore) -> PageViews | None:
    """The pages that the head attends to; None for a head without attention."""
    if not head.layers:
        return None
    if model.table is None:  # the model is on the CPU
        return PageViews(model, store, head.layers)
    from tokenmill.runtime.speculation.captured_views import CapturedViews

    return CapturedViews(model, store, head.layers)


def load_head(folder: Path, model: LoadedModel) -> MedusaHeads | EagleHead:
    remedy = "make one with tokenmill train-draft, or give a published EAGLE head"
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE} and {WEIGHTS_FILE}", remedy)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        kind, depth, width = config["kind"], int(config["depth"]), int(config["width"])
        layers = tuple(int(layer) for layer in config.get("layers", ()))
        fingerprint, version = config["target"], config["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} cannot be read ({error})", remedy) from error
    if version not in (1, FORMAT) or kind not in HEAD_KINDS:  # format 1 has no layers
        raise CheckpointError(f"{folder} holds a head of unknown kind '{kind}' or format {version}", remedy)
    if fingerprint != target_fingerprint(model):
        raise UserError(f"the head in {folder} was trained for another model: {fingerprint}", remedy)
    d = model.decoder.description
    if not set(layers) <= {layer for layer, name in enumerate(d.layer_kinds) if name == "full"}:
        raise CheckpointError(
            f"the head in {folder} attends to layers {layers}, not all of which have full attention", remedy
        )
    head = build_head(kind, d.hidden_size, depth, width, layers, d.num_heads * d.head_dim)
    try:
        head.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except Exception as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} does not fit its config ({error})", remedy) from error
    return head


def target_fingerprint(model: LoadedModel) -> str:
    """What a head must agree with its target in. A head also fits other quantizations of the same model."""
    d = model.decoder.description
    return f"{d.architecture}/{d.num_layers}x{d.hidden_size}/{d.vocab_size}"
