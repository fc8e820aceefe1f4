"""Measures heads on real text for KV stores whose codes follow from it (model/kvstore/head_sample.py).

Steps compute some sequences of the built-in text, or of the user's own, one after the other, and first tokens of
others: attention sinks that a store codes apart. Keys and queries are taken before rotary positions; how queries some
way behind meet a key is averaged over distances, near ones more than far ones, as attention is. Called once, by
build.py, on every rank alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.tokenizer_files import tokenizer_of
from tokenmill.config import ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.log import get_logger
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.head_sample import HeadSample
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.eager import EagerExecutor
from tokenmill.runtime.observation.default_text import default_text
from tokenmill.runtime.observation.key_conditioning import MeasuringOps, pseudo_random_tokens, query_moment
from tokenmill.types import Batch

_log = get_logger(__name__)
_TOKENS, _LENGTH = 2048, 256  # in sequences of this length
_FIRSTS = 64  # first tokens of other texts
_TEXT_BYTES = 12 * _TOKENS
_PAGE = 8
# Distances from a query back to a key: as many below 4 as from 4 to 16 or from 1,024 to 4,096. Attention that counts
# (its square) falls a little faster in smollm2, the query's own token apart.
_DISTANCES = torch.exp(torch.linspace(0, 8.3, 512, dtype=torch.float64)) - 1


def calibrate_store(
    store: KVStore, model: LoadedModel, config: ResolvedConfig, checkpoint: Checkpoint, context: int
) -> None:
    """Tell the store what the heads of each layer are like."""
    on_gpu, parts = model.table is not None, config.tensor_parallel_size * config.context_parallel_size
    if config.pipeline_parallel_size > 1 or (on_gpu and parts > 1):
        raise UserError(
            f"KV pages of type {store.name} are calibrated over all layers together, not by these ranks",
            "use --tensor-parallel-size on a CPU, or another --kv-cache-dtype",
        )
    began = time.perf_counter()
    if context < 2:
        raise UserError(
            f"KV pages of type {store.name} are calibrated on tokens behind first ones, and the context is {context}",
            "give a larger --context, or another --kv-cache-dtype",
        )
    length = min(_LENGTH, context)
    ids, begins, origin = _calibration_ids(checkpoint, config)
    places = {layer: store.layout.place(layer) for group in store.layout.groups for layer in group.layers}
    found = {layer: _Heads() for layer in places}
    # No more where more are allowed: the last bits, and so the codes, then do not depend on the option.
    _compute(model, config, _sequences(ids, begins, length), min(config.batch_tokens, _LENGTH), found)
    for layer in sorted(found):
        store.calibrate(*places[layer], found.pop(layer).sample(bool(begins)))
    _log.info("KV pages are calibrated on %s: %.2f s", origin, time.perf_counter() - began)


def _calibration_ids(checkpoint: Checkpoint, config: ResolvedConfig) -> tuple[list[int], list[int], str]:
    """Token ids of a text, those that begin every text, and what the text is."""
    vocabulary = checkpoint.description.vocab_size
    tokenizer, _ = tokenizer_of(checkpoint.path, config.load_format)
    if not tokenizer.reads_text:
        if config.kv_calibration:
            raise UserError("--kv-calibration is given, but the model has no tokenizer", "leave it out")
        _log.warning("KV pages are calibrated on made-up tokens, because the model has no tokenizer: expect more loss")
        return pseudo_random_tokens(vocabulary, _TOKENS).tolist(), [], "made-up tokens"
    text = _own_text(config.kv_calibration) if config.kv_calibration else default_text(_TEXT_BYTES)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if config.kv_calibration and len(ids) < _TOKENS:
        raise UserError(
            f"the first {_TEXT_BYTES >> 10} KiB of '{config.kv_calibration}' have {len(ids)} tokens, calibration needs"
            f" {_TOKENS}",
            "give more, and plainer, text, or leave --kv-calibration out",
        )
    begins = tokenizer.encode("")[:1]
    origin = config.kv_calibration or "the built-in text"
    return [min(token, vocabulary - 1) for token in ids], begins, origin


def _own_text(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(_TEXT_BYTES).decode("utf-8", errors="ignore")
    except OSError as error:
        raise UserError(f"cannot read '{name}': {error.strerror}", "give a text file with --kv-calibration") from None


def _sequences(ids: list[int], begins: list[int], length: int) -> list[list[int]]:
    """First tokens in sequences of their own, that which begins every text first; then the text, evenly spaced."""
    count, new = _TOKENS // length, length - len(begins)
    firsts = [begins] if begins else []
    firsts += [[ids[number * (len(ids) - 1) // _FIRSTS]] for number in range(_FIRSTS)]
    step = max(0, len(ids) - new) / max(1, count - 1)
    return firsts + [begins + ids[int(number * step) :][:new] for number in range(count)]


class _Heads:
    """What the steps so far have shown of a layer, on the host. Of queries and values it is sums, not all of them."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._value_sum = self._moment_sum = torch.zeros((), dtype=torch.float64)
        self._firsts: list[tuple[Tensor, Tensor]] = []
        self._key_table: RotaryTable | None = None

    def add_firsts(self, keys: Tensor, values: Tensor) -> None:
        self._firsts.append((keys.cpu(), values.cpu()))

    def add(
        self, queries: Tensor, keys: Tensor, values: Tensor, tables: tuple[RotaryTable | None, RotaryTable | None]
    ) -> None:
        query_table, self._key_table = tables
        if query_table is not None:  # two positions say how far each pair turns, and whole tables are large
            cos, sin = (table[:2].cpu() for table in (query_table.cos, query_table.sin))
            query_table = RotaryTable(cos, sin, query_table.interleaved)
        moment = query_moment(queries.cpu().unflatten(1, (keys.shape[1], -1)), query_table, _DISTANCES)
        self._moment_sum = self._moment_sum + moment * len(queries)
        self._value_sum = self._value_sum + values.cpu().double().sum(0)
        self._keys.append(keys.cpu())

    def sample(self, begins: bool) -> HeadSample:
        keys = torch.cat(self._keys)
        mean, moment = (self._value_sum / len(keys)).float(), self._moment_sum / len(keys)
        first_keys, first_values = (torch.cat(each) for each in zip(*self._firsts, strict=True))
        return HeadSample(keys, mean, first_keys, first_values, begins, moment, self._key_table)


@torch.inference_mode()
def _compute(
    model: LoadedModel, config: ResolvedConfig, sequences: list[list[int]], most: int, found: dict[int, _Heads]
) -> None:
    """At most `most` tokens at once."""
    layout = build_layout(model.decoder.kv_layers(), _PAGE)
    groups, on_gpu = len(layout.groups), model.table is not None
    pages = str(model.table.dtype).removeprefix("torch.") if model.table is not None else "float32"
    runs = list(_runs(sequences, most))
    num_pages, most_rows = max(groups * len(run) * _pages_of(run) for run in runs), max(map(len, runs))
    store = KV_STORES.get(pages)(layout, num_pages, model.device, model.kernels, most_rows)
    executor = None if on_gpu else EagerExecutor(model, store, config)
    for run in runs:
        store.states.clear(range(len(run)))
        for begin in range(0, max(map(len, run)), most):
            batch = _batch(model.device, run, begin, begin + most, groups)
            add = partial(_add, found, batch, len(run[0]) == 1)
            if executor is not None:
                model.decoder.forward(MeasuringOps(executor, batch, add))
                continue
            from tokenmill.runtime.observation.device_conditioning import measure_on_device

            measure_on_device(model, store, batch, add)


def _add(
    found: dict[int, _Heads],
    batch: Batch,
    firsts: bool,
    spec: AttentionSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[RotaryTable | None, RotaryTable | None],
) -> None:
    if spec.layer not in found:
        return
    later = batch.positions > 0  # the first token of a text is left out, as others stand for it
    if firsts:
        found[spec.layer].add_firsts(keys, values)
    elif bool(later.any()):
        found[spec.layer].add(queries[later], keys[later], values[later], tables)


def _runs(sequences: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    """What is in pages at the same time: first tokens, as many as may be computed at once, or one text."""
    firsts = [each for each in sequences if len(each) == 1]
    for begin in range(0, len(firsts), most):
        yield firsts[begin : begin + most]
    yield from ([each] for each in sequences if len(each) > 1)


def _pages_of(run: list[list[int]]) -> int:
    """Of each of its sequences, in each group."""
    return -(-max(map(len, run)) // _PAGE)


def _batch(device: torch.device, run: list[list[int]], begin: int, end: int, groups: int) -> Batch:
    """These tokens of each sequence of a run."""
    parts, width = [each[begin:end] for each in run], _pages_of(run)
    lengths = [len(part) for part in parts]
    tables = torch.arange(groups * len(run) * width).view(groups, len(run), width)
    positions = torch.cat([torch.arange(begin, begin + length) for length in lengths])
    rows = torch.arange(len(run)).repeat_interleave(torch.tensor(lengths))
    slots = tables[:, rows, positions // _PAGE] * _PAGE + positions % _PAGE
    return Batch(
        token_ids=torch.tensor([token for part in parts for token in part], device=device),
        positions=positions.to(device),
        query_starts=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor([begin + length for length in lengths], dtype=torch.int32, device=device),
        slots=tuple(slots.to(device)),
        block_tables=tuple(tables.to(device, torch.int32)),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        max_query=max(lengths),
        max_seq=begin + max(lengths),
        state_slots=torch.arange(len(run), device=device),
    )
