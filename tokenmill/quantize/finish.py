"""The end of a job: measure the assembled files against the source, write the card, and move them into place or aside.

The quality gate itself is evaluate/gate.py; this module acts on its verdict. A refused result is kept as OUT.rejected
with the reason in it, and the user gets one line.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.quantize.calibration_text import built_in_held_out, read_text
from tokenmill.quantize.card import CardContent, write_card
from tokenmill.quantize.low_rank import FOLDER
from tokenmill.quantize.output import CARD, REASON, move_into_place
from tokenmill.quantize.workspace import Workspace

GATE_CONTEXT = 512
_CHARACTERS_PER_TOKEN = 5
DEFAULT_MAX_LOSS = 0.05  # what a careful user would still serve; a deployment with tasks of its own wants 0.01


@dataclass(frozen=True, slots=True)
class GateRequest:
    enabled: bool = True
    text: Path | None = None  # None: held-out calibration text, else built-in text
    max_quality_loss: float = DEFAULT_MAX_LOSS  # fraction by which perplexity may rise
    max_chunks: int = 16
    max_kld: float | None = None  # of the mean divergence, nats; None: what goes with max_quality_loss
    threads: int = 0
    device: str = "auto"  # that the gate's engine runs on
    in_turn: bool = False  # one model in memory at a time, the reference's logits on the disk


def conclude(
    workspace: Workspace, out: Path, content: CardContent, request: GateRequest, reference: str, held_out: str
) -> Mapping[str, Any]:
    """Gate, card, rename. Returns the measurements; raises when the result is refused."""
    if not request.enabled:
        write_card(workspace.result / CARD, content)
        move_into_place(workspace, out)
        return {"gate": "off"}
    measured, reason, words = measure(workspace.result, request, reference, held_out)
    write_card(workspace.result / CARD, replace(content, gate=measured, gate_text=words))
    if reason:
        rejected = out.with_name(out.name + ".rejected")
        (workspace.result / REASON).write_text(reason + "\n", encoding="utf-8")
        if rejected.exists():
            shutil.rmtree(rejected)
        move_into_place(workspace, rejected)
        raise refusal(measured, reason, out, rejected, "use more bits, smaller groups or another method")
    move_into_place(workspace, out)
    return {"gate": "passed", **measured}


def refusal(measured: Mapping[str, Any], reason: str, out: Path, kept: Path, remedy: str) -> UserError:
    """Both figures beside their limits, what was kept, and what to do."""
    return UserError(
        f"the quantized model is refused: {reason} (perplexity {measured['quality_loss']:+.2%}, limit "
        f"{measured['max_quality_loss']:.2%}; divergence {measured['kld_mean']:.4g}, limit {measured['max_kld']:.4g} "
        f"nats). It was kept as {kept}; {out} was not written",
        f"{remedy}, or raise --max-quality-loss and --max-kld",
    )


def measure(candidate: Path, request: GateRequest, reference: str, held_out: str) -> tuple[Mapping[str, Any], str, str]:
    """(figures, reason of refusal or "", description of the text)."""
    from tokenmill.evaluate.gate import GateLimits, default_max_kld, run_gate

    context = min(GATE_CONTEXT, open_checkpoint(candidate).description.context_length)
    text, words = gate_text(request, held_out, context)
    max_kld = default_max_kld(request.max_quality_loss) if request.max_kld is None else request.max_kld
    limits = GateLimits(max_quality_loss=request.max_quality_loss, max_kld_mean=max_kld)
    adapter = candidate / FOLDER
    config = EngineConfig(
        threads=request.threads or None,
        device=request.device,
        prefix_caching=False,
        lora=(f"{FOLDER}={adapter}",) if adapter.is_dir() else (),
    )
    scratch = candidate.with_name(candidate.name + ".logits") if request.in_turn else None
    try:
        gate = run_gate(candidate, reference, text, limits, config, context=context, cached=False, scratch=scratch)
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
    report = asdict(gate)
    reasons, _ = report.pop("reasons"), report.pop("passed")
    report |= {"max_quality_loss": limits.max_quality_loss, "max_kld": limits.max_kld_mean}
    return report, "; ".join(reasons), words


def gate_text(request: GateRequest, held_out: str, context: int) -> tuple[str, str]:
    """(text, description of it), cut so that the gate takes minutes however long the text is."""
    if request.text is not None:
        text, words = read_text(request.text), request.text.name
    elif held_out:
        text, words = held_out, "held-out calibration text"
    else:
        text, words = built_in_held_out(), "built-in text"
    max_characters = request.max_chunks * context * _CHARACTERS_PER_TOKEN
    return text[:max_characters], words
