"""Model types: which architecture computes each, and what its config class or its code fixes without saying so.

A model type that is not in the table is read by the defaults of `Family`, with its own name as the architecture: that
is enough to plan with it, and to run it where somebody registers such an architecture. Facts only; read by the other
files of this folder and by hf_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.checkpoint.description import Routing
from tokenmill.errors import UserError

_MIXTRAL = Routing("softmax")


@dataclass(frozen=True, slots=True)
class Family:
    """One model type. Where the config is silent these are the defaults; None leaves it to a key of the config."""

    architecture: str = ""  # empty: the model type itself
    context_length: int = 4096
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    # Which layers slide where the config does not list them: "all", "never", "tail" (Qwen: from a layer on), "even", or
    # "period" (all but every n-th).
    sliding: str = "all"
    sliding_window: int = 0  # where the key is absent
    lists_layers: bool = True  # whether `layer_types` counts
    mixer: str = ""  # of every layer: "recurrent", or "both" (attention beside it); empty: attention, or by the config
    has_mlp: bool = True
    norms: str = "pre"
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    head_norms: str = ""
    optional_head_norms: str = "head"  # those that `use_qk_norm` switches on
    qkv_bias: bool | None = None  # None: `attention_bias`
    output_bias: bool | None = None
    mlp_bias: bool | None = None  # None: `mlp_bias`
    gated: bool = True
    activation_key: str = "hidden_act"
    activation: str = "silu"
    positions: str = "rope"
    rope_theta: float = 1e4
    local_rope_theta: float | None = None  # of the sliding layers, where they have a table of their own
    rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rope_layers: str = "all"  # "all" | "listed" (`no_rope_layers`, else all but every 4th) | "sliding"
    query_scalar: float | None = None  # q.k is multiplied by its root's inverse; None: head_dim
    scales_embedding: bool = False  # by the root of the hidden size
    sinks: bool = False
    output_gate: bool = False
    routing: Routing = _MIXTRAL
    bos_id: int | None = None
    eos_id: int | None = None
    tie_embeddings: bool = False
    overflows_float16: bool = False
    other_features: tuple[str, ...] = ()
    # Published Gemma 3 configs leave most sizes out; elsewhere a missing size is a damaged file.
    sizes: tuple[tuple[str, int], ...] = ()


_GEMMA = Family(
    sliding="never",
    norm_offset=1.0,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    scales_embedding=True,
    tie_embeddings=True,
    overflows_float16=True,
)
_GEMMA2 = replace(_GEMMA, sliding="even", norms="sandwich", query_scalar=256.0)
_GEMMA3 = replace(
    _GEMMA2,
    architecture="gemma3",
    context_length=131_072,
    num_kv_heads=4,
    head_dim=256,
    sliding="period",
    sliding_window=4096,
    head_norms="head",
    rope_theta=1e6,
    local_rope_theta=1e4,
    bos_id=2,
    eos_id=1,
    sizes=(
        ("hidden_size", 2304),
        ("intermediate_size", 9216),
        ("num_hidden_layers", 26),
        ("num_attention_heads", 8),
        ("vocab_size", 262_208),
    ),
)
_GEMMA3N = replace(_GEMMA3, architecture="", norm_offset=0.0, query_scalar=1.0, other_features=("alternating updates",))
_QWEN2 = Family(
    "qwen2",
    context_length=32_768,
    num_kv_heads=32,
    sliding="tail",
    sliding_window=4096,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
)
_QWEN3 = replace(_QWEN2, architecture="qwen3", head_dim=128, head_norms="head", qkv_bias=None, output_bias=None)
_QWEN_SOFTMAX = Routing("softmax", normalize=False)
_DEEPSEEK3 = Routing("sigmoid", correction_bias=True)
_COHERE = Family(
    norms="parallel",
    norm="layer",
    eps_key="layer_norm_eps",
    optional_head_norms="heads",
    rope_interleaved=True,
    tie_embeddings=True,
)
_GLM = Family(rotary_factor=0.5, rope_interleaved=True, qkv_bias=True, output_bias=False)
_UNGATED = Family(norm="layer", norm_bias=True, eps_key="layer_norm_eps", gated=False, activation="gelu")
_LEARNED = replace(_UNGATED, positions="learned", activation_key="activation_function", tie_embeddings=True)
_QWEN_NEXT = Family(norm_offset=1.0, head_norms="head", rotary_factor=0.25, output_gate=True)
_MAMBA = Family(positions="none", mixer="recurrent", has_mlp=False, tie_embeddings=True, eps_key="layer_norm_epsilon")

FAMILIES: dict[str, Family] = {
    # Run by the engine.
    "llama": Family("llama", context_length=2048, sliding="never", lists_layers=False, bos_id=1, eos_id=2),
    "mistral": Family(
        "llama",
        context_length=131_072,
        num_kv_heads=8,
        sliding_window=4096,
        lists_layers=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        bos_id=1,
        eos_id=2,
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma3_text": replace(_GEMMA3, mlp_bias=False),
    "gemma3": replace(_GEMMA3, mlp_bias=False),
    # Described for planning.
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "olmo2": Family(norms="post", head_norms="projection"),
    "olmo3": Family(norms="post", head_norms="projection"),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rope_layers="sliding"),
    "smollm3": Family(rope_layers="listed", rope_theta=2e6, tie_embeddings=True),
    "glm": _GLM,
    "glm4": replace(_GLM, norms="sandwich"),
    "starcoder2": replace(_UNGATED, eps_key="norm_epsilon", activation="gelu_pytorch_tanh"),
    "opt": replace(_LEARNED, activation="relu"),
    "gpt2": replace(_LEARNED, activation="gelu_new"),
    "bloom": replace(_UNGATED, positions="alibi", tie_embeddings=True),
    "mpt": replace(_UNGATED, positions="alibi"),
    "gpt_neox": replace(_UNGATED, norms="parallel", rotary_factor=0.25),
    "gptj": replace(_UNGATED, norms="parallel", rope_interleaved=True),
    "falcon": replace(_UNGATED, norms="parallel"),
    "phi": replace(_UNGATED, norms="parallel", rotary_factor=0.5),
    "nemotron": replace(_UNGATED, rotary_factor=0.5, activation="relu2"),
    "qwen2_moe": replace(_QWEN2, architecture="", num_kv_heads=None, routing=_QWEN_SOFTMAX),
    "qwen3_moe": replace(_QWEN3, architecture="", num_kv_heads=None, head_dim=None, routing=_QWEN_SOFTMAX),
    "olmoe": Family(head_norms="projection", routing=_QWEN_SOFTMAX),
    "deepseek_v2": Family("deepseek_v2", routing=Routing("softmax", normalize=False)),
    "deepseek_v3": Family("deepseek_v3", routing=_DEEPSEEK3),
    "kimi_k2": Family("deepseek_v3", routing=_DEEPSEEK3),
    "glm4_moe": Family(rotary_factor=0.5, qkv_bias=True, output_bias=False, routing=_DEEPSEEK3),
    "gpt_oss": Family(
        sliding="even",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_theta=150_000.0,
        sinks=True,
        routing=Routing("softmax_of_selected"),
    ),
    "llama4_text": Family(
        rope_layers="listed",
        rope_interleaved=True,
        routing=Routing("sigmoid", normalize=False),
        other_features=("expert weights on the input",),
    ),
    "jamba": Family(positions="none", routing=Routing("softmax", normalize=False)),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "falcon_mamba": _MAMBA,
    "bamba": Family(rotary_factor=0.5),
    "granitemoehybrid": Family(positions="none"),
    "falcon_h1": Family(mixer="both", other_features=("multipliers of each projection",)),
    "qwen3_next": replace(_QWEN_NEXT, routing=Routing("softmax")),
    "qwen3_5": _QWEN_NEXT,
    "qwen3_5_moe": replace(_QWEN_NEXT, routing=Routing("softmax")),
}


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family())


def register_model_type(model_type: str, family: Family) -> None:
    """Register a model type whose config defaults differ from those of `Family`."""
    if model_type in FAMILIES:
        raise UserError(f"model type '{model_type}' is already registered", "choose another name")
    FAMILIES[model_type] = family
