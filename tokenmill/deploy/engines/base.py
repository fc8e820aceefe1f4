"""The contract of an engine that can be deployed: its launch line, health check and metrics.

An engine turns a `Serving` into a `Launch` or refuses with a reason and a remedy; it never drops a setting silently.
Knows nothing of Kubernetes, compose or systemd, which read `Launch` and the attributes. Called by the targets.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError

WEIGHTS_FOLDER = "/models"  # where targets mount the weights
METRICS_KEY, PEER_KEY = "metrics", "peer"  # of the Secret: for who reads metrics, for servers and routers of the same


@dataclass(frozen=True, slots=True)
class Launch:
    """`files`: name -> text, to lie in `/etc/serving`. `prepare`: shell lines to run once, before the first start.
    `secrets`: variable -> key of the Secret that holds it."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Signals:
    """PromQL of the two numbers that decide how many replicas there should be, per replica; empty: not measured."""

    path: str  # where metrics are read
    queue: str  # metric: requests waiting
    kv: str = ""  # metric: share of the KV cache in use, 0 to 1
    running: str = ""  # metric: requests being computed
    tokens: str = ""  # counter that increases while work is done


class Engine(ABC):
    name: str
    planner_name: str  # as plan/data/engines.toml spells it
    version: str  # whose flags these are
    image: str
    cpu_image: str = ""  # where devices are CPUs; empty: the same
    port: int = 8000
    health: str = "/health"
    ready: str = ""  # takes requests; empty: the same as `health`
    live: str = ""  # need not be restarted; empty: the progress check, or the same as `health`
    health_tool: str = "python"  # what its image can ask with: "python", "curl", or a command of its own
    keys_file_flag: str = ""  # flag that takes a file of API keys
    key_variable: str = ""  # environment variable that holds the API key
    key_flag: str = ""  # flag that takes the key itself, where the engine reads no variable
    metrics_need_key: bool = False
    health_sees_progress = False  # the health check fails when no tokens are generated
    signals: Signals | None = None
    can_split = False  # prefill and decode in separate pools
    can_route = False  # its router also serves pools that are not split, and answers the engine's own probes
    max_tp = 0  # devices that may share a layer; 0: as many as the plan says

    @abstractmethod
    def launch(self, serving: Serving, role: str = "") -> Launch:
        """The launch line; `role`: "prefill" or "decode" of a split deployment."""

    def router(self, serving: Serving, prefill: Sequence[str], decode: Sequence[str]) -> tuple[str, Launch]:
        """(image, launch) of the router in front of split pools; `prefill` and `decode` are host names."""
        raise UserError(
            f"{self.name} cannot split prefill and decode ({len(prefill)} + {len(decode)} of {serving.name})",
            "use vllm, sglang or trtllm, or drop --split",
        )

    def peers(self, prefill: Sequence[str]) -> tuple[str, ...]:  # noqa: ARG002
        """What pods that decode are told of those that prefill, by their host names, where the router does not."""
        return ()

    def node_arguments(self, nodes: int, is_leader: bool) -> tuple[str, ...]:  # noqa: ARG002
        """What the pods of a replica that spans nodes add to their launch line."""
        raise UserError(
            f"the ranks of a replica of {self.name} share one node, not {nodes}",
            "plan for fewer devices per replica, or use --engine vllm or sglang",
        )

    def image_for(self, serving: Serving) -> str:
        return self.cpu_image if self.cpu_image and not serving.on_gpu else self.image


def quantized(serving: Serving, recipes: dict[str, str], engine: str) -> tuple[str, tuple[str, ...]]:
    """(model to load, lines that make it). `recipes`: weight format -> flags of `tokenmill quantize`."""
    if not serving.needs_quantizing:
        return serving.model, ()
    if serving.weights not in recipes:
        raise UserError(
            f"{engine} cannot serve {serving.weights} weights of a {serving.stored} checkpoint",
            f"plan with --weights {' or '.join([serving.stored, *recipes])}, or another --engine",
        )
    gguf = serving.weights.startswith("q")
    path = f"{WEIGHTS_FOLDER}/{serving.name}-{serving.weights}" + (".gguf" if gguf else "")
    place, model = shlex.quote(path), shlex.quote(checked_model(serving.model))
    return path, (f"[ -e {place} ] || tokenmill quantize {model} {recipes[serving.weights]} --out {place}",)


def checked_model(model: str) -> str:
    """The model as a word of a shell line or a file: an id, an alias or a path, never a flag or several lines."""
    if not model or model.startswith("-") or not model.isprintable():
        raise UserError(f"{model!r} is no model name", "give an alias, a Hugging Face id or a path")
    return model


COMPRESSED_TENSORS = {  # what vLLM and SGLang read best
    "int4-g128": "--method gptq --format compressed-tensors --bits 4 --group-size 128",
    "int4-g128-sym": "--method gptq --format compressed-tensors --bits 4 --group-size 128 --symmetric",
    "int8": "--method smoothquant+gptq --format compressed-tensors",
    "nvfp4": "--method nvfp4 --format compressed-tensors",
}
GGUF_TYPES = {name: f"--type {name.upper()}" for name in ("q8_0", "q6_k")}  # need no calibration
GGUF_TYPES |= {name: f"--method imatrix --type {name.upper()}" for name in ("q5_k_m", "q4_k_m", "q4_0", "q3_k_m")}
