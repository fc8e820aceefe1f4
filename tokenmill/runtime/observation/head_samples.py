"""Measures heads on real text for KV stores whose codes follow from it (model/kvstore/head_sample.py).

One step computes some sequences of the built-in text, or of the user's own, and first tokens of others: attention sinks
that a store codes apart. Keys and queries are taken before rotary positions; how queries some way behind meet a key is
averaged over distances, near ones more than far ones, as attention is. Called once, by build.py, on every rank alike.
"""

from __future__ import annotations

import time
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
from tokenmill.runtime.observation.heads import Add
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
            f"KV pages of type {store.name} are calibrated in one step over all layers, not by these ranks",
            "use --tensor-parallel-size on a CPU, or another --kv-cache-dtype",
        )
    began = time.perf_counter()
    length = min(_LENGTH, context)
    ids, begins, origin = _calibration_ids(checkpoint, config)
    places = {layer: store.layout.place(layer) for group in store.layout.groups for layer in group.layers}

    def add(
        spec: AttentionSpec,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: tuple[RotaryTable | None, RotaryTable | None],
    ) -> None:
        if spec.layer in places:
            store.calibrate(*places[spec.layer], _sample(spec, queries, keys, values, tables, bool(begins), length))

    _compute(model, config, _sequences(ids, begins, length), add)
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


def _sample(
    spec: AttentionSpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: tuple[RotaryTable | None, RotaryTable | None],
    begins: bool,
    length: int,
) -> HeadSample:
    """`length`: of the sequences of text; their first tokens are left out, as others stand for them."""
    firsts = _FIRSTS + begins  # those of `_sequences`
    keys, values, queries = (rows.cpu() for rows in (keys, values, queries))
    on_host = tables[0] and RotaryTable(tables[0].cos.cpu(), tables[0].sin.cpu(), tables[0].interleaved)
    queries, later_keys, later_values = (
        rows[firsts:].unflatten(0, (-1, length))[:, 1:].flatten(0, 1) for rows in (queries, keys, values)
    )
    moment = query_moment(queries.unflatten(1, (spec.num_kv_heads, -1)), on_host, _DISTANCES)
    return HeadSample(later_keys, later_values, keys[:firsts], values[:firsts], begins, moment, tables[1])


@torch.inference_mode()
def _compute(model: LoadedModel, config: ResolvedConfig, sequences: list[list[int]], add: Add) -> None:
    layout = build_layout(model.decoder.kv_layers(), _PAGE)
    groups, on_gpu = len(layout.groups), model.table is not None
    pages = str(model.table.dtype).removeprefix("torch.") if model.table is not None else "float32"
    batch, num_pages = _batch(model.device, sequences, groups)
    store = KV_STORES.get(pages)(layout, num_pages, model.device, model.kernels, len(sequences))
    store.states.clear(range(len(sequences)))
    if on_gpu:
        from tokenmill.runtime.observation.device_conditioning import measure_on_device

        measure_on_device(model, store, batch, add)
    else:
        model.decoder.forward(MeasuringOps(EagerExecutor(model, store, config), batch, add))


def _batch(device: torch.device, sequences: list[list[int]], groups: int) -> tuple[Batch, int]:
    """Sequences that begin, and the pages that they need."""
    lengths = [len(each) for each in sequences]
    width, num_pages = -(-max(lengths) // _PAGE), 0
    tables = torch.full((groups, len(sequences), width), -1, dtype=torch.int32)
    slots: list[Tensor] = []
    for group in range(groups):
        rows = []
        for number, length in enumerate(lengths):
            count = -(-length // _PAGE)
            tables[group, number, :count] = torch.arange(num_pages, num_pages + count)
            rows.append(num_pages * _PAGE + torch.arange(length))
            num_pages += count
        slots.append(torch.cat(rows).to(device))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    batch = Batch(
        token_ids=torch.tensor([token for each in sequences for token in each], device=device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        query_starts=starts.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=tuple(slots),
        block_tables=tuple(table.to(device) for table in tables),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        max_query=max(lengths),
        max_seq=max(lengths),
        state_slots=torch.arange(len(sequences), device=device),
    )
    return batch, num_pages
