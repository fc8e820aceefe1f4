"""llama.cpp's own quantizer and llama.cpp's own measurement, through its library: runs where llama-cpp-python is.

    python llamacpp_quality.py quantize SOURCE.gguf OUT.gguf Q4_K_M [--imatrix FILE.gguf]
    python llamacpp_quality.py compare REFERENCE.gguf FILE.gguf ... --text FILE [--context 512] [--chunks 8]
    python llamacpp_quality.py likeliest FILE.gguf --sequences FILE.json [--batch 512]

`compare` prints JSON: the perplexity of each file and its mean KL divergence from the reference, over the second half
of each chunk, as llama-perplexity counts them. `likeliest`: of each sequence of tokens, read in batches of so many, the
two likeliest next tokens of each position with their log-probabilities. The importance matrix is handed over as
llama-quantize does. Imports nothing of ours, so that it runs in an environment of its own. Called by gguf_mixed.py,
golden_distance.py and quantizers.py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from pathlib import Path

import llama_cpp as lib
import numpy as np

_SILENT = lib.llama_log_callback(lambda *_: None)
FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip


def quantize(source: Path, out: Path, type_name: str, imatrix: Path | None, threads: int) -> dict[str, object]:
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = threads, FILE_TYPES[type_name], True
    entries = _read_imatrix(imatrix) if imatrix else {}
    table = (lib.llama_model_imatrix_data * (len(entries) + 1))()
    for number, (name, values) in enumerate(entries.items()):
        table[number].name = name.encode()
        table[number].data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        table[number].size = values.size
    if entries:  # the last entry has no name: it ends the table
        params.imatrix = ctypes.cast(table, ctypes.POINTER(lib.llama_model_imatrix_data))
    started = time.monotonic()
    failed = lib.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    assert not failed, f"llama.cpp cannot quantize {source} to {type_name}"
    return {"bytes": out.stat().st_size, "seconds": time.monotonic() - started}


def _read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Tensor name -> mean square of its input, of the GGUF form of an importance matrix."""
    from gguf import GGUFReader

    tensors = {each.name: np.array(each.data, dtype=np.float32).ravel() for each in GGUFReader(path).tensors}
    stems = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    return {stem: np.ascontiguousarray(tensors[stem + ".in_sum2"] / tensors[stem + ".counts"][0]) for stem in stems}


class Model:
    def __init__(self, path: Path, context: int, threads: int, batch: int | None = None) -> None:
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_ubatch = batch or context
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocabulary = lib.llama_model_get_vocab(self._model)
        self._size = lib.llama_vocab_n_tokens(self._vocabulary)

    def tokens(self, text: str) -> list[int]:
        raw = text.encode()
        room = (lib.llama_token * (len(raw) + 8))()
        count = lib.llama_tokenize(self._vocabulary, raw, len(raw), room, len(room), False, False)
        return list(room[:count])

    def first(self) -> list[int]:
        """What begins every chunk."""
        added = lib.llama_vocab_get_add_bos(self._vocabulary)
        return [lib.llama_vocab_bos(self._vocabulary)] if added else []

    def log_probabilities(self, tokens: list[int], begin: int) -> np.ndarray:
        """float32 [positions from begin, vocabulary]."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for position, token in enumerate(tokens):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = position >= begin
        assert lib.llama_decode(self._context, batch) == 0
        rows = len(tokens) - begin
        found = np.ctypeslib.as_array(lib.llama_get_logits(self._context), shape=(rows, self._size)).copy()
        lib.llama_batch_free(batch)
        found -= found.max(1, keepdims=True)
        found -= np.log(np.exp(found).sum(1, keepdims=True))
        return found


def compare(files: list[Path], text: str, context: int, chunks: int, threads: int) -> list[dict[str, object]]:
    """Of each file; the first is the reference."""
    models = [Model(path, context, threads) for path in files]
    tokens, first = models[0].tokens(text), models[0].first()
    body = context - len(first)
    losses: list[list[float]] = [[] for _ in files]
    divergences: list[list[float]] = [[] for _ in files]
    for begin in range(0, min(len(tokens) - body, chunks * body), body):
        chunk = [*first, *tokens[begin : begin + body]]
        half = len(chunk) // 2
        targets = np.array(chunk[half + 1 :])
        reference = np.empty(0)
        for number, model in enumerate(models):
            rows = model.log_probabilities(chunk, half)[:-1]
            losses[number] += (-rows[np.arange(len(targets)), targets]).tolist()
            if number == 0:
                reference = rows
            divergences[number] += (np.exp(reference) * (reference - rows)).sum(1).tolist()
    return [
        {
            "file": str(path),
            "bytes": path.stat().st_size,
            "tokens": len(loss),
            "perplexity": math.exp(sum(loss) / len(loss)),
            "divergence": sum(divergence) / len(divergence),
            "divergence_error": float(np.std(divergence) / math.sqrt(len(divergence))),
        }
        for path, loss, divergence in zip(files, losses, divergences, strict=True)
    ]


def likeliest(path: Path, sequences: list[list[int]], batch: int, threads: int) -> list[list[list[tuple[int, float]]]]:
    model = Model(path, max(map(len, sequences)), threads, batch)
    found = []
    for tokens in sequences:
        rows = model.log_probabilities(tokens, 0)
        best = np.argsort(-rows, 1)[:, :2]
        found.append([[(int(token), float(row[token])) for token in two] for row, two in zip(rows, best, strict=True)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("quantize")
    one.add_argument("source", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("type", choices=FILE_TYPES)
    one.add_argument("--imatrix", type=Path)
    other = commands.add_parser("compare")
    other.add_argument("files", type=Path, nargs="+")
    other.add_argument("--text", type=Path, required=True)
    other.add_argument("--context", type=int, default=512)
    other.add_argument("--chunks", type=int, default=8)
    last = commands.add_parser("likeliest")
    last.add_argument("file", type=Path)
    last.add_argument("--sequences", type=Path, required=True)
    last.add_argument("--batch", type=int, default=512)
    arguments = parser.parse_args()
    lib.llama_log_set(_SILENT, None)
    lib.llama_backend_init()
    if arguments.command == "quantize":
        found: object = quantize(arguments.source, arguments.out, arguments.type, arguments.imatrix, arguments.threads)
    elif arguments.command == "likeliest":
        found = likeliest(
            arguments.file, json.loads(arguments.sequences.read_text()), arguments.batch, arguments.threads
        )
    else:
        text = arguments.text.read_text(encoding="utf-8")
        found = compare(arguments.files, text, arguments.context, arguments.chunks, arguments.threads)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
