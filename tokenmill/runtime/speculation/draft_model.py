"""A second, smaller model as the drafter: any model with the target's vocabulary.

It has weights, an executor and KV pages of its own, but uses the target's page tables: page 17 of a request in the
target's memory is page 17 in the draft model's, so one KV manager serves both and a shared prefix is shared here too.
All its layers are in one page, under the target's table of the layers with full attention. Knows nothing of the
target's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.hardware.machine import available_memory
from tokenmill.log import get_logger
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel, declines_float16, load_model
from tokenmill.runtime.executors import choose_executor
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.chain import ChainDrafting
from tokenmill.runtime.speculation.page_contents import PageContents
from tokenmill.types import ScheduledTokens

_log = get_logger(__name__)


class DraftModel(Drafter):
    name = "draft"
    computes = True

    def __init__(self, model: LoadedModel, target: Target) -> None:
        self._group = full_group(target.store.layout, "draft")
        layout = _one_group(model, target.store.layout.page_size)
        store_class = KV_STORES.get(_page_type(model))
        self._nbytes = _check_memory(store_class.page_bytes(layout), target)
        self._store: KVStore = store_class(layout, target.store.num_pages, model.device, model.kernels)
        executor, _ = choose_executor(target.config.executor, model, self._store, target.config)
        vocab_size = target.model.decoder.description.vocab_size
        self._chain = ChainDrafting(executor, target.executor.sampler, vocab_size)
        self._contents = PageContents(layout.page_size)
        self._max_tokens = target.config.batch_tokens

    @classmethod
    def build(cls, argument: str, target: Target) -> DraftModel:
        if not argument:
            raise UserError("--speculate draft needs a model", "write --speculate draft:MODEL")
        path = resolve(argument).path
        checkpoint = open_checkpoint(path)
        check_vocabulary(path, checkpoint.description, target.model.checkpoint)
        _check_context(checkpoint, target)
        config = target.config
        float16 = target.model.dtype == "float16" and not declines_float16(checkpoint.description)
        dtype = "float16" if float16 else ""
        return cls(load_model(checkpoint, target.model.device, config.context, config.kernels, dtype=dtype), target)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        own = [replace(row, block_tables=(row.block_tables[self._group],)) for row in rows]
        starts = [self._contents.num_valid(row.request.token_ids[:-1], row.block_tables[0]) for row in own]
        limits = self._within_budget(own, starts, limits)
        drafts = self._chain.draft(own, starts, limits)
        for row, start, draft in zip(own, starts, drafts, strict=True):
            if draft.token_ids:
                # The last drafted token was sampled, but its KV is not computed.
                computed = [*row.request.token_ids, *draft.token_ids[:-1]]
                self._contents.write(computed, start, row.block_tables[0])
        return drafts

    def _within_budget(self, rows: list[ScheduledTokens], starts: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Limits such that a step of the draft model has no more tokens than one of the target: a row with too many
        uncomputed tokens gets no draft this time. Rows that a KV budget took pages from never get one."""
        left, allowed = self._max_tokens, []
        for row, start, limit in zip(rows, starts, limits, strict=True):
            missing = row.request.num_tokens - start
            allowed.append(limit if missing <= left and not row.num_dropped else 0)
            left -= missing if allowed[-1] else 0
        return allowed


def _page_type(model: LoadedModel) -> str:
    if model.device.type != "cuda":
        return "float32"
    return "float16" if model.dtype == "float16" else "bfloat16"


def full_group(layout: KVLayout, name: str) -> int:
    """The KV group whose page table keeps every token."""
    for number, group in enumerate(layout.groups):
        if group.kind in ("full", "latent"):
            return number
    raise UserError(
        f"--speculate {name} needs a target with full attention; all layers of this one have sliding windows",
        "use --speculate suffix",
    )


def check_vocabulary(path: Path, description: ModelDescription, target: Checkpoint) -> None:
    """Refuse a draft model whose token ids mean something else."""
    sizes = (description.vocab_size, target.description.vocab_size)
    remedy = "choose a draft model of the same family, or use --speculate suffix"
    target_tokenizer, draft_tokenizer = load_tokenizer(target.path), load_tokenizer(path)
    different = _first_difference(target_tokenizer, draft_tokenizer, min(sizes))
    if different is not None or target_tokenizer.vocab_size != draft_tokenizer.vocab_size:
        detail = "" if different is None else f" (token {different} differs)"
        raise UserError(
            f"the draft model has another vocabulary: {sizes[0]} tokens, the target has {sizes[1]}{detail}", remedy
        )


def _first_difference(left: Tokenizer, right: Tokenizer, size: int) -> int | None:
    return next((n for n in range(size) if left.token_bytes(n) != right.token_bytes(n)), None)


def _check_context(checkpoint: Checkpoint, target: Target) -> None:
    trained = checkpoint.description.context_length
    if trained < target.config.context:
        raise UserError(
            f"the draft model was trained for {trained} tokens, the context is {target.config.context}",
            f"lower --context to {trained} or choose another draft model",
        )


def _one_group(model: LoadedModel, page_size: int) -> KVLayout:
    """All layers in one page: attention applies their windows, but no page is freed early."""
    layers = model.decoder.kv_layers()
    if any(layer.states for layer in layers):
        raise UserError("a draft model with recurrent layers is not supported", "choose another draft model")
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise UserError("the draft model's layers have KV heads of different shapes", "choose another draft model")
    ((heads, head_dim),) = shapes
    group = KVGroup("full", 0, tuple(range(len(layers))))
    return KVLayout(page_size, len(layers), heads, head_dim, (group,))


def _check_memory(page_bytes: int, target: Target) -> int:
    needed = page_bytes * target.store.num_pages
    if target.model.device.type == "cpu" and needed > available_memory() // 2:
        raise UserError(
            f"the draft model's KV pages need {needed / 2**30:.1f} GiB in addition to the target's",
            "lower --memory or --context",
        )
    _log.info("draft model: %.1f MiB of KV pages", needed / 2**20)
    return needed
