"""What rounding weights and inputs costs a model, apart and together, and at which linears.

    python benchmarks/rounding_costs.py smollm2 fp8 smoothquant rotation+smoothquant gptq:bits=4,group_size=64

Each method is run block by block as `tokenmill quantize` runs it, but in memory, and scored by llama.cpp's protocol:
with both sides rounded, which is what the file computes, with rounded weights and float inputs, and with transformed
float weights and rounded inputs. Losses are of the perplexity against the float model, with the standard error of the
paired difference; the divergence (nats a token) tells apart what that error hides. Text and calibration are those of
quantization_order.py; --limit-bytes 0 scores the whole text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.quantization_order import SUBJECTS, Subject
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.sources import resolve
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.evaluate.windows import TextJob, Window
from tokenmill.kernels.ref import rms_norm
from tokenmill.kernels.rounding import CALIBRATED, round_input
from tokenmill.model.formats.base import LinearWeight
from tokenmill.quantize.calibrate import CalibratedBlock, HiddenStates
from tokenmill.quantize.calibration_ops import CalibrationOps
from tokenmill.quantize.calibration_text import read_calibration
from tokenmill.quantize.device import choose_device, describe_device
from tokenmill.quantize.edges import Edges
from tokenmill.quantize.recipe import RecipeRequest, build_recipe
from tokenmill.quantize.source import EMBEDDING, FINAL_NORM, HEAD, SourceModel

_BATCH = 8  # sequences at a time
_LOGIT_ROWS = 2048
_FIELDS = ("bits", "group_size", "symmetric")


class RoundingOps(CalibrationOps):
    """The calibration forward pass with the inputs of some linears rounded. `kinds`: by name, as in rounding.py."""

    kinds: Mapping[str, str]

    def linear(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        kind = self.kinds.get(self._names[id(weights[0])], "none")
        return super().linear(round_input(x, kind), weights)


@dataclass(frozen=True, slots=True)
class Solved:
    """A method's result on the whole model, as tensors on the device."""

    transformed: list[dict[str, Tensor]]  # of each block, before rounding
    rounded: list[dict[str, Tensor]]
    kinds: dict[str, str]  # how the input of each linear is rounded
    edges: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Outputs:
    rows: Tensor  # [scored positions, hidden], normed
    head: Tensor


class Experiment:
    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        name, _, location = model.partition("=")
        self.subject: Subject = SUBJECTS[name]
        self.device = choose_device(arguments.device)
        path = resolve(location or name).path
        self.source = SourceModel(open_checkpoint(path), self.subject.context)
        tokenizer = load_tokenizer(path)
        texts = arguments.shared / "data/text"
        self.windows: list[Window] = TextJob(
            texts / self.subject.text, self.subject.context, arguments.limit_bytes
        ).cut(tokenizer)
        self.calibration = read_calibration(
            texts / self.subject.calibration, tokenizer, None, self.subject.samples, self.subject.context
        ).sequences
        self.shapes = {name: self.source.shape(name) for name in self.source.layer_linears()}

    def original(self) -> Solved:
        tensors = [self._block(index).tensors for index in range(self.source.num_blocks)]
        return Solved(tensors, tensors, {}, self._edges(Edges(self.source)))

    @torch.no_grad()
    def solve(self, request: RecipeRequest) -> Solved:
        recipe = build_recipe(request, self.shapes)
        edges = Edges(self.source)
        for transform in recipe.transforms:
            transform.begin(edges)
        states = HiddenStates(edges.embed(self.calibration), _BATCH)
        transformed, rounded = [], []
        for index in range(self.source.num_blocks):
            block = self._block(index, states)
            names = [name for group in block.groups for name in group.names if name in recipe.scheme_of]
            scheme_of = {name: recipe.scheme_of[name] for name in names}
            with torch.enable_grad():
                for transform in recipe.transforms:
                    transform.apply(block, scheme_of)
                transformed.append(dict(block.tensors))
                recipe.solver.solve(block, scheme_of)
            rounded.append(dict(block.tensors))
            if recipe.needs_calibration:
                block.advance()
        kinds = {name: scheme.activations for name, scheme in recipe.scheme_of.items()}
        assert not set(kinds.values()) & set(CALIBRATED), "static input scales are not simulated"
        return Solved(transformed, rounded, kinds, self._edges(edges))

    @torch.no_grad()
    def outputs(
        self, blocks: Sequence[Mapping[str, Tensor]], edges: Mapping[str, Tensor], kinds: Mapping[str, str]
    ) -> Outputs:
        """Inputs of the head at every position whose next token is scored."""
        rows = []
        for begin in range(0, len(self.windows), _BATCH):
            windows = self.windows[begin : begin + _BATCH]
            ids = torch.tensor([window.token_ids for window in windows], device=self.device)
            states = (edges[EMBEDDING][ids] * self.source.description.embedding_scale).flatten(0, 1)
            for index, tensors in enumerate(blocks):
                ops = RoundingOps(self.source.names, tensors, ids.shape[1])
                ops.kinds = kinds
                residual, update = self.source.block(index)(ops, states, None)
                states = residual + update
            first = windows[0].first  # the same in all: half of a window is scored
            scored = states.view(*ids.shape, -1)[:, first - 1 : -1].flatten(0, 1)
            rows.append(rms_norm(scored, edges[FINAL_NORM], self.source.description.norm_eps))
        return Outputs(torch.cat(rows), edges[HEAD])

    @torch.no_grad()
    def compare(self, outputs: Outputs, original: Outputs) -> tuple[Tensor, Tensor]:
        """float64, of every scored token: minus its log-probability, and the divergence from the original there."""
        targets = torch.tensor([token for window in self.windows for token in window.token_ids[window.first :]])
        losses, divergences = [], []
        for begin in range(0, len(targets), _LOGIT_ROWS):
            cut = slice(begin, begin + _LOGIT_ROWS)
            ours, theirs = ((each.rows[cut] @ each.head.T).double().log_softmax(-1) for each in (outputs, original))
            losses.append(-ours.gather(1, targets[cut].to(self.device).unsqueeze(1)).squeeze(1))
            divergences.append((theirs.exp() * (theirs - ours)).sum(-1))
        return torch.cat(losses), torch.cat(divergences)

    def _block(self, index: int, states: HiddenStates | None = None) -> CalibratedBlock:
        return CalibratedBlock(self.source, index, states, self.device)

    def _edges(self, edges: Edges) -> dict[str, Tensor]:
        return {name: edges.weight(name).to(self.device) for name in (EMBEDDING, FINAL_NORM, HEAD)}


def report(experiment: Experiment, words: str, solved: Solved, original: Outputs, detailed: bool) -> None:
    """Rows of the table for one method."""
    plain, _ = experiment.compare(original, original)

    def row(label: str, blocks: Sequence[Mapping[str, Tensor]], kinds: Mapping[str, str]) -> None:
        losses, divergences = experiment.compare(experiment.outputs(blocks, solved.edges, kinds), original)
        difference = losses - plain
        ratio = float(difference.mean().exp())
        spread = ratio * float(difference.std()) / len(difference) ** 0.5
        cells = [words, label, f"{float(losses.mean().exp()):.4f}", f"{ratio - 1:+.2%} +/- {spread:.2%}"]
        print("|", " | ".join([*cells, f"{float(divergences.mean()):.5f}"]), "|", flush=True)

    if all(kind == "none" for kind in solved.kinds.values()):
        row("weights", solved.rounded, solved.kinds)
        return
    row("both", solved.rounded, solved.kinds)
    row("weights", solved.rounded, {})
    row("inputs", solved.transformed, solved.kinds)
    if detailed:
        firsts = [group.names[0].rsplit(".", 1)[1] for group in experiment.source.groups(0)]
        for ending in firsts:
            kinds = {name: kind for name, kind in solved.kinds.items() if name.endswith(ending)}
            row(f"inputs of {ending}", solved.transformed, kinds)


def parse_method(text: str) -> RecipeRequest:
    """ "gptq:bits=4,order=static" -> a request."""
    method, _, rest = text.partition(":")
    pairs = [pair.partition("=")[::2] for pair in rest.split(",") if pair]
    fixed: dict[str, Any] = {name: int(value) for name, value in pairs if name in _FIELDS}
    return RecipeRequest(method, **fixed, options=tuple((n, v) for n, v in pairs if n not in _FIELDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SUBJECTS)}, or NAME=PATH where the file is elsewhere")
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--by-linear", action="store_true", help="also the inputs of one kind of linear at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit-bytes", type=int, default=20_000)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    arguments = parser.parse_args()
    experiment = Experiment(arguments.model, arguments)
    untouched = experiment.original()
    original = experiment.outputs(untouched.rounded, untouched.edges, {})
    losses, _ = experiment.compare(original, original)
    device = describe_device(experiment.device)
    print(f"{arguments.model}, {len(losses)} tokens scored, float {float(losses.mean().exp()):.4f}, {device}\n")
    print("| method | rounded | perplexity | loss | divergence |\n|---|---|---|---|---|", flush=True)
    for text in arguments.methods:
        report(experiment, text, experiment.solve(parse_method(text)), original, arguments.by_linear)


if __name__ == "__main__":
    main()
