"""What a model is, in one record, layer by layer, whatever file it came from.

Filled from GGUF metadata or from a Hugging Face `config.json`; read by the architectures, the quantizer, the memory
model and the planner, so that all of them see the same model. It describes more than the engine runs: `features` names
what goes beyond the plain decoder, and an architecture runs a model only if it has all of them. Says nothing about how
weights are stored; knows no files. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from tokenmill.checkpoint.mixers import SCALED_PROJECTIONS, Attention, LatentAttention, Mixer, Recurrent
from tokenmill.hardware.kv_layout import LayerKV

# What the plain decoder computes without further features.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
_PLAIN_SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind`: "default", "linear", "llama3", "yarn", "longrope", ..."""

    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None: derived from `factor`
    mscale: float = 0.0  # yarn, as DeepSeek uses it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: one divisor per frequency
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeTable:
    """One table of rotary frequencies; attention layers refer to it by name."""

    name: str
    rotary_dim: int  # leading numbers of each head that are rotated
    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen and weighted."""

    score: str = "softmax"  # "softmax" | "sigmoid" | "softmax_of_selected"
    normalize: bool = True  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0
    num_groups: int = 1  # experts are chosen within the best `top_groups` groups
    top_groups: int = 1
    group_score: str = "two_best"  # of a group: the sum of its "two_best" scores, or its "max"
    correction_bias: bool = False  # DeepSeek-V3: added to the scores for choosing, not for weighting
    bias: bool = False  # of the router's product
    weights_on_input: bool = False  # Llama 4: weights multiply what an expert reads, not what it returns


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The half of a layer after the mixer: a dense MLP, or experts (with a dense one that every token passes)."""

    intermediate_size: int = 0  # of the dense MLP; 0: there are experts instead
    gated: bool = True  # activation(gate(x)) * up(x); else activation(up(x))
    activation: str = "silu"
    bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0  # width of the experts that every token passes
    shared_gate: bool = False  # their output is multiplied by the sigmoid of a product with one row
    clamp: float = 0.0  # GPT-OSS: gate and up are clamped, and the gate's sigmoid is steeper; 0: off
    routing: Routing | None = None
    gate_scale: float = 1.0  # multiplies the gate before its activation
    output_scale: float = 1.0

    @property
    def width(self) -> int:
        """Numbers of one token's widest activation."""
        return max(self.intermediate_size, self.experts_per_token * self.expert_size + self.shared_size)


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """One layer. `mixers` read the same input and their outputs are added: one, as a rule; none; two in Falcon-H1.

    `norms` says where a layer has them: "pre" (before each half), "sandwich" (before and after each half), "post"
    (after each half only), "parallel" (one norm, whose output both halves read), "parallel_norms" (both halves read the
    layer's input, each through a norm of its own).
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    norms: str = "pre"

    @property
    def kind(self) -> str:
        """ "full" | "sliding" | "chunked" | "latent" | "recurrent" | "none"; of side-by-side mixers the first."""
        return self.mixers[0].kind if self.mixers else "none"

    @property
    def rope(self) -> str:
        """The rotary table of its attention."""
        (name,) = {mixer.rope for mixer in self.mixers if not isinstance(mixer, Recurrent)}
        return name

    @property
    def attention(self) -> Attention:
        """The attention of a layer that has one, perhaps beside another mixer."""
        (mixer,) = (mixer for mixer in self.mixers if isinstance(mixer, Attention))
        return mixer


@dataclass(frozen=True, slots=True)
class ModelDescription:
    architecture: str  # a name in model/architectures, where the engine runs it
    hidden_size: int
    layers: tuple[LayerDescription, ...]
    vocab_size: int
    context_length: int
    norm_eps: float = 1e-6
    model_type: str = field(default="", compare=False)  # as the file spells it
    norm: str = "rms"  # "rms" | "layer" (the mean is removed)
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to stored norm weights: Gemma's safetensors store weight - 1
    rope_tables: tuple[RopeTable, ...] = ()
    rope_interleaved: bool = False  # pairs are (2i, 2i+1) instead of (i, i + dim/2): GGUF's order for llama
    positions: str = "rope"  # "rope" | "learned" | "alibi" | "none"
    tie_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each half adds
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: off
    overflows_float16: bool = False  # its activations exceed the range of float16
    # Behind the others in the file, for guessing tokens ahead (DeepSeek-V3, GLM-4.5): not computed
    draft_layers: int = field(default=0, compare=False)
    vision_parameters: int = 0  # of an image tower beside the text model
    other_features: tuple[str, ...] = ()  # in words: what this record has no field for
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    name: str = ""

    # --- by layer ---

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return tuple(layer.kind for layer in self.layers)

    @property
    def num_sliding_layers(self) -> int:
        return sum(kind == "sliding" for kind in self.layer_kinds)

    @property
    def intermediate_size(self) -> int:
        """The widest activation of a feed-forward."""
        return max((layer.feed_forward.width for layer in self.layers if layer.feed_forward), default=0)

    def rope_table(self, name: str) -> RopeTable:
        return {table.name: table for table in self.rope_tables}[name]

    def kv_layers(self) -> list[LayerKV]:
        """What each layer keeps: the input of the KV layout."""
        return [_kv_need(layer) for layer in self.layers]

    # --- for models whose layers are alike; 0 or empty where there are none of the kind ---

    @property
    def num_heads(self) -> int:
        return int(self._same(lambda a: a.num_heads))

    @property
    def num_kv_heads(self) -> int:
        return int(self._same(lambda a: a.num_kv_heads))

    @property
    def head_dim(self) -> int:
        """Of keys as they are kept; of latent attention the whole row."""
        return int(self._same(lambda a: a.head_dim))

    @property
    def sliding_window(self) -> int:
        """Of the sliding layers; 0 where there are none."""
        windows = {a.window for a in self._attentions() if a.window}
        assert len(windows) <= 1, f"windows differ: {sorted(windows)}"
        return windows.pop() if windows else 0

    @property
    def attention_softcap(self) -> float:
        caps = {a.softcap for a in self._attentions()}
        assert len(caps) <= 1, f"layers differ: {caps}"
        return caps.pop() if caps else 0.0

    @property
    def activation(self) -> str:
        names = {layer.feed_forward.activation for layer in self.layers if layer.feed_forward}
        assert len(names) <= 1, f"layers differ: {names}"
        return names.pop() if names else ""

    def _attentions(self) -> Iterator[Attention]:
        for layer in self.layers:
            for mixer in layer.mixers:
                if isinstance(mixer, Attention):
                    yield mixer

    def _same(self, read: Callable[[Attention | LatentAttention], Any]) -> Any:
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        values = {read(mixer) for mixer in mixers if not isinstance(mixer, Recurrent)}
        assert len(values) <= 1, f"layers differ: {values}"
        return values.pop() if values else 0

    # --- changed copies ---

    def with_attention(self, **changes: Any) -> ModelDescription:
        """With these fields changed in the attention of every layer."""
        layers = tuple(
            replace(layer, mixers=tuple(replace(m, **changes) if isinstance(m, Attention) else m for m in layer.mixers))
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def with_rope_scaling(self, name: str, scaling: RopeScaling) -> ModelDescription:
        tables = (replace(table, scaling=scaling) if table.name == name else table for table in self.rope_tables)
        return replace(self, rope_tables=tuple(tables))

    # --- what goes beyond the plain decoder ---

    def features(self) -> tuple[str, ...]:
        """In words, once each: what an architecture must support besides full and sliding rotary attention with norms
        before each half (RMS) and a gated MLP."""
        names = [feature for layer in self.layers for feature in _layer_features(layer)]
        rotary = {name: self.rope_table(name) for name in dict.fromkeys(a.rope for a in self._attentions() if a.rope)}
        if any(table.rotary_dim != a.head_dim for a in self._attentions() if (table := rotary.get(a.rope))):
            names.append("partial rotary embedding")
        kinds = [table.scaling.kind for table in self.rope_tables]
        names += [f"rope scaling '{kind}'" for kind in kinds if kind not in _PLAIN_SCALINGS]
        for condition, feature in (
            (self.positions == "learned", "learned positions"),
            (self.positions == "alibi", "ALiBi"),
            (self.norm == "layer", "LayerNorm"),
            (self.head_bias, "a bias of the head"),
            (self.residual_scale != 1.0, "scaled residual branches"),
            (self.logit_scale != 1.0, "scaled logits"),
        ):
            if condition:
                names.append(feature)
        return tuple(dict.fromkeys([*names, *self.other_features]))


def _kv_need(layer: LayerDescription) -> LayerKV:
    needs = [mixer.kv_need() for mixer in layer.mixers]
    if not needs:
        return LayerKV("none")
    if len(needs) == 1:
        return needs[0]
    states = tuple(shape for need in needs for shape in need.states)
    paged = next((need for need in needs if need.kind != "recurrent"), needs[0])
    return replace(paged, states=states)


def _layer_features(layer: LayerDescription) -> Iterator[str]:
    if layer.feed_forward is not None and layer.feed_forward.num_experts:
        yield "experts"
    for mixer in layer.mixers:
        yield from mixer.features()
    if not layer.mixers:
        yield "layers without a mixer"
    if len(layer.mixers) > 1:
        yield "mixers side by side"
    names = {"sandwich": "norms before and after each half", "post": "norms after each half only"}
    if layer.norms != "pre":
        yield names.get(layer.norms, "parallel blocks")
    ffn = layer.feed_forward
    if ffn is None:
        yield "layers without an MLP"
    else:
        if not ffn.gated:
            yield "MLPs without a gate"
        if ffn.activation not in ACTIVATIONS:
            yield f"activation '{ffn.activation}'"
        if (ffn.gate_scale, ffn.output_scale) != (1.0, 1.0):
            yield SCALED_PROJECTIONS


def differences(ours: Any, theirs: Any, same: Callable[[Any, Any], bool] = lambda a, b: bool(a == b)) -> list[str]:
    """Names of the fields in which two descriptions differ, down to those of layers and mixers, once each."""
    names: list[str] = []
    for each in fields(ours):
        if not each.compare:
            continue
        a, b = getattr(ours, each.name), getattr(theirs, each.name)
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and any(map(is_dataclass, a)):
            pairs = list(zip(a, b, strict=True))
        else:
            pairs = [(a, b)]
        for mine, other in pairs:
            if is_dataclass(mine) and type(mine) is type(other):
                names += differences(mine, other, same)
            elif not same(mine, other):
                names.append(each.name)
    return list(dict.fromkeys(names))
