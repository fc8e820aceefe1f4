"""What each KV store costs in quality: perplexity and divergence from the same model with float32 pages, same tokens.

    python benchmarks/kv_quality.py smollm2 --text TEXT.txt [--context 512,4096] [--tokens 20000] [--dtypes int8,int4]
                               [--device cuda] [--native-layers N] [--conditioning full|centers|none] [--threads N]
                               [--calibration TEXT] [--json FILE]

`--device cuda`: the reference has pages of the model's own type there, and all stores with GPU kernels are measured.
`limit` is what docs/kv_cache.md promises of the ratio, and whether it held. `--conditioning centers`: keys on a
CPU as on a GPU, only centered.

Every key and value a token attends to comes out of the pages, within its own chunk too, so a prompt shows what decoding
would show. Bytes per token are those the engine reserves. The reference's log-probabilities are cached as
docs/evaluation.md says; the paired ratio of perplexities has a far smaller error than either perplexity.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.evaluate.divergence import compare_tokens, summarize
from tokenmill.evaluate.likelihood import no_progress
from tokenmill.evaluate.perplexity import scoring_config
from tokenmill.evaluate.reference import Reference, open_reference
from tokenmill.evaluate.windows import TextJob, Window
from tokenmill.hardware.memory import kv_bytes_per_token
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.choice import reading_path
from tokenmill.model.kvstore.conditioning import KeyConditioning
from tokenmill.model.kvstore.rows import RowStore

NATIVE = "float32"
COLUMNS = (
    "| KV dtype | bytes/token | of 16 bits | perplexity | ratio | +- | limit "
    "| mean KL | p99 KL | same top | read as | s |"
)
# Of the ratio, from docs/kv_cache.md ("Choosing").
LIMITS = dict.fromkeys(("int8", "int8_per_token_head", "fp8", "fp8_e4m3"), 1.003) | dict.fromkeys(
    ("int4", "int4_per_token_head", "turboquant4"), 1.02
)


@dataclass(frozen=True)
class Row:
    dtype: str
    context: int
    tokens: int
    bytes_per_token: float
    share: float  # of 16-bit floats
    perplexity: float
    ratio: float
    ratio_stderr: float
    kld_mean: float
    kld_p99: float
    top1: float
    read_as: str
    seconds: float

    @property
    def limit(self) -> str:
        if self.dtype not in LIMITS:
            return "-"
        return f"{LIMITS[self.dtype]} {'held' if self.ratio <= LIMITS[self.dtype] else 'MISSED'}"

    def markdown(self) -> str:
        cells = [
            self.dtype,
            f"{self.bytes_per_token:,.0f}",
            f"{self.share:.3f}",
            f"{self.perplexity:.4f}",
            f"{self.ratio:.4f}",
            f"{self.ratio_stderr:.4f}",
            self.limit,
            f"{self.kld_mean:.5f}",
            f"{self.kld_p99:.4f}",
            f"{self.top1:.3f}",
            self.read_as,
            f"{self.seconds:.0f}",
        ]
        return f"| {' | '.join(cells)} |"


def measure(path: Path, config: EngineConfig, reference: Reference, windows: list[Window]) -> Row:
    began = time.perf_counter()
    with LLM(str(path), config) as llm:
        report = summarize(compare_tokens(llm, reference, windows), reference, len(windows))
        runtime = llm.parts.runtime
        layout = runtime.layout
        size = kv_bytes_per_token(layout, runtime.budget.page_bytes)
        sixteen = kv_bytes_per_token(layout, 2 * layout.values_per_page)
        read_as = reading_path(runtime.store)
    return Row(
        config.kv_cache_dtype or NATIVE,
        config.context,
        report.tokens,
        size,
        size / sixteen,
        report.perplexity,
        report.perplexity_ratio,
        report.perplexity_ratio_stderr,
        report.kld_mean,
        report.kld_p99,
        report.top1_agreement,
        read_as,
        time.perf_counter() - began,
    )


def condition_less(kind: str) -> None:
    """Have row stores use a part of what was measured for their keys."""

    def condition_keys(self: RowStore, slot: int, conditioning: KeyConditioning) -> None:
        if kind == "centers":
            k, v = self._formats[slot]
            self.use_formats(slot, k.conditioned(conditioning.centered(), feedback=False), v)

    RowStore.condition_keys = condition_keys  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> list[Row]:
    path = resolve(arguments.model).path
    rows: list[Row] = []
    for context in (int(each) for each in arguments.context.split(",")):
        job = TextJob(arguments.text, context, max_chunks=max(1, arguments.tokens // context))

        def windows_of(tokenizer: Tokenizer, job: TextJob = job) -> list[Window]:
            return job.cut(tokenizer)

        windows = windows_of(load_tokenizer(path))
        config = EngineConfig(
            kernels=arguments.kernels,
            kv_native_layers=arguments.native_layers,
            device=arguments.device,
            threads=arguments.threads,
        )
        on_gpu = arguments.device == "cuda"
        native = scoring_config(replace(config, kv_cache_dtype=None if on_gpu else NATIVE), context)
        cached = not arguments.no_cache
        reference = open_reference(str(path), windows, windows_of, native, cached, no_progress)
        print(f"\n{arguments.model}, context {context}, {sum(each.num_scored for each in windows)} tokens scored\n")
        print(COLUMNS)
        print("|" + "---|" * (COLUMNS.count("|") - 1), flush=True)
        every = [name for name in KV_STORES if not on_gpu or KV_STORES.get(name).on_gpu]
        for dtype in arguments.dtypes.split(",") if arguments.dtypes else every:
            own_text = arguments.calibration if dtype.startswith("kvquant") else ""
            candidate = replace(native, kv_cache_dtype=dtype, kv_calibration=own_text)
            rows.append(measure(path, candidate, reference, windows))
            print(rows[-1].markdown(), flush=True)
        reference.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias, path or hub id")
    parser.add_argument("--text", type=Path, required=True, help="a plain text, long enough for the contexts")
    parser.add_argument("--context", default="512,4096", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of the text for each context")
    parser.add_argument("--dtypes", default="", help="comma-separated (default: all stores)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--conditioning", default="full", choices=("full", "centers", "none"), help="of keys, on a CPU")
    parser.add_argument("--native-layers", type=int, help="at each end; default: as the dtype says")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "--calibration", default="", help="a text for stores with measured codes; empty: the built-in one"
    )
    parser.add_argument("--kernels", default="", help="ref: float32 activations; empty: the default kernels")
    parser.add_argument("--no-cache", action="store_true", help="run the reference beside each candidate")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    if arguments.conditioning != "full":
        condition_less(arguments.conditioning)
    rows = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
