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
    multi_query: bool = False  # one KV head, unless `multi_query` or `new_decoder_architecture` says otherwise
    head_dim: int | None = None  # None: hidden size / heads
    # Which layers slide where the config does not list them: "all", "never", "tail" (Qwen: from a layer on), "even",
    # "even_below" (Qwen2-MoE: even ones below a layer), "switched" (all, if `use_sliding_window`), "period" (all but
    # every n-th), or "chunks" (Llama 4: rotated layers attend within chunks).
    sliding: str = "all"
    sliding_window: int = 0  # where the key is absent
    sliding_period: int = 6  # "period": every n-th layer is full, where the config does not say
    lists_layers: bool = True  # whether `layer_types` counts
    mixer: str = ""  # of every layer: "recurrent", or "both" (attention beside it); empty: attention, or by the config
    recurrence: str = ""  # style of recurrent layers: "mamba" | "mamba2" | "delta"; empty: by the sizes in the config
    step_norms: str = ""  # of Mamba's time steps, B and C
    joined_inputs: bool = True  # of the gated delta rule: q, k, v and z are one matrix
    dense_size_key: str = ""  # the key of a dense MLP's width, where it is not `intermediate_size`
    has_mlp: bool = True
    norms: str = "pre"
    # A key that says whether the halves are parallel, with what holds where it is absent; then `norms` is how.
    parallel_key: str = ""
    parallel: bool = True
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    eps_key: str = "rms_norm_eps"
    norm_eps: float = 1e-6
    head_norms: str = ""
    optional_head_norms: str = "head"  # those that `head_norms_key` switches on
    head_norms_key: str = "use_qk_norm"
    uses_head_norms: bool = False  # where `head_norms_key` is absent
    bias_key: str = "attention_bias"
    bias: bool = False  # where `bias_key` is absent
    qkv_bias: bool | None = None  # None: by `bias_key`
    output_bias: bool | None = None
    mlp_bias: bool | None = None  # None: by `mlp_bias_key`, false where it is absent
    mlp_bias_key: str = "mlp_bias"
    head_bias: bool = False
    gated: bool = True
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tanh_gelu: bool = False  # "gelu" means its tanh approximation
    positions: str = "rope"
    rope_theta: float = 1e4
    local_rope_theta: float | None = None  # of the sliding layers, where they have a table of their own
    rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rope_layers: str = "all"  # "all" | "listed" (`no_rope_layers`, else all but every 4th) | "sliding"
    query_scalar: float | None = None  # q.k is multiplied by its root's inverse; None: head_dim
    scales_embedding: bool = False  # by the root of the hidden size
    attention_softcap: float = 0.0  # where the key is absent; null switches it off
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    latent: bool = False  # all attention keeps latents; elsewhere `kv_lora_rank` says so
    sinks: bool = False
    temperature: bool = False  # layers without rotary embedding scale their queries by position
    shared_gate: bool = False  # the shared expert has one
    clamp: float = 0.0  # of the experts' activation, where `swiglu_limit` is absent
    expert_size_key: str = "moe_intermediate_size"
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
    context_length=8192,
    head_dim=256,
    sliding="never",
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    tanh_gelu=True,
    scales_embedding=True,
    tie_embeddings=True,
    overflows_float16=True,
    bos_id=2,
    eos_id=1,
)
_GEMMA2 = replace(
    _GEMMA,
    num_kv_heads=4,
    sliding="even",
    sliding_window=4096,
    norms="sandwich",
    activation_key="hidden_activation",
    tanh_gelu=False,
    query_scalar=256.0,
    attention_softcap=50.0,
    logit_softcap=30.0,
)
_GEMMA3 = replace(
    _GEMMA2,
    architecture="gemma3",
    attention_softcap=0.0,
    logit_softcap=0.0,
    context_length=131_072,
    sliding="period",
    sliding_window=4096,
    head_norms="head",
    rope_theta=1e6,
    local_rope_theta=1e4,
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
_OLMO2 = Family(context_length=2048, norms="post", norm_eps=1e-5, head_norms="projection", mlp_bias=False)
_COHERE = Family(
    context_length=8192,
    norms="parallel",
    norm="layer",
    eps_key="layer_norm_eps",
    norm_eps=1e-5,
    optional_head_norms="heads",
    mlp_bias=False,
    rope_theta=5e5,
    rope_interleaved=True,
    logit_scale=0.0625,
    tie_embeddings=True,
    bos_id=5,
    eos_id=255_001,
)
_GLM = Family(
    context_length=131_072,
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1.5625e-7,
    bias=True,
    output_bias=False,
    mlp_bias=False,
    rotary_factor=0.5,
    rope_interleaved=True,
)
_LAYER_NORMS = Family(norm="layer", norm_bias=True, eps_key="layer_norm_eps", norm_eps=1e-5)
_UNGATED = replace(_LAYER_NORMS, gated=False, activation="gelu")
_LEARNED = replace(
    _UNGATED,
    positions="learned",
    activation_key="activation_function",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
)
_QWEN_NEXT = Family(norm_offset=1.0, head_norms="head", rotary_factor=0.25, output_gate=True, recurrence="delta")
_QWEN35 = replace(_QWEN_NEXT, architecture="qwen3_5", joined_inputs=False)
_QWEN35_MOE = replace(_QWEN35, architecture="qwen3_5_moe", routing=Routing("softmax"), shared_gate=True)
_MAMBA = Family(
    positions="none",
    mixer="recurrent",
    recurrence="mamba",
    has_mlp=False,
    tie_embeddings=True,
    eps_key="layer_norm_epsilon",
    norm_eps=1e-5,
)

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
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "phi3": Family(norm_eps=1e-5, qkv_bias=False, output_bias=False, mlp_bias=False, bos_id=1, eos_id=32_000),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, sliding="period", sliding_period=4, sliding_window=4096, rope_theta=5e5),
    "granite": Family(context_length=2048, query_scalar=1.0, bos_id=1, eos_id=2),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        sliding="period",
        sliding_period=4,
        sliding_window=4096,
        optional_head_norms="",
        rope_theta=1e4,
        rope_layers="sliding",
    ),
    "smollm3": Family(
        context_length=32_768, num_kv_heads=4, rope_layers="listed", rope_theta=2e6, tie_embeddings=True, eos_id=128_001
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms="sandwich"),
    "starcoder2": replace(
        _UNGATED,
        num_kv_heads=2,
        eps_key="norm_epsilon",
        activation="gelu_pytorch_tanh",
        bias_key="use_bias",
        bias=True,
        mlp_bias_key="use_bias",
        tie_embeddings=True,
    ),
    "stablelm": replace(
        _LAYER_NORMS,
        num_kv_heads=32,
        norms="parallel",
        parallel_key="use_parallel_residual",
        parallel=False,
        optional_head_norms="heads",
        head_norms_key="qk_layernorm",
        bias_key="use_qkv_bias",
        output_bias=False,
        mlp_bias=False,
        rotary_factor=0.25,
    ),
    "gpt_neox": replace(
        _UNGATED,
        context_length=2048,
        norms="parallel_norms",
        parallel_key="use_parallel_residual",
        bias=True,
        mlp_bias=True,
        rotary_factor=0.25,
    ),
    "gpt2": replace(_LEARNED, context_length=1024, eps_key="layer_norm_epsilon", activation="gelu_new"),
    "falcon": replace(
        _UNGATED,
        context_length=2048,
        multi_query=True,
        norms="parallel",
        parallel_key="parallel_attn",
        eps_key="layer_norm_epsilon",
        activation_key="activation",
        bias_key="bias",
        mlp_bias_key="bias",
        tie_embeddings=True,
    ),
    "phi": replace(
        _UNGATED,
        context_length=2048,
        norms="parallel",
        activation="gelu_new",
        head_norms_key="qk_layernorm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        rotary_factor=0.5,
    ),
    # Described for planning.
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "opt": replace(_LEARNED, activation="relu"),
    "bloom": replace(_UNGATED, positions="alibi", tie_embeddings=True),
    "mpt": replace(_UNGATED, positions="alibi"),
    "gptj": replace(_UNGATED, norms="parallel", rope_interleaved=True),
    "nemotron": replace(_UNGATED, rotary_factor=0.5, activation="relu2"),
    "mixtral": Family(rope_theta=1e6, expert_size_key="intermediate_size", bos_id=1, eos_id=2),
    "qwen2_moe": replace(
        _QWEN2, architecture="", num_kv_heads=None, sliding="even_below", routing=_QWEN_SOFTMAX, shared_gate=True
    ),
    "qwen3_moe": replace(
        _QWEN3, architecture="", num_kv_heads=None, head_dim=None, sliding="switched", routing=_QWEN_SOFTMAX
    ),
    "olmoe": Family(head_norms="projection", routing=_QWEN_SOFTMAX, expert_size_key="intermediate_size"),
    "granitemoe": Family(
        context_length=2048, query_scalar=1.0, expert_size_key="intermediate_size", bos_id=1, eos_id=2
    ),
    "deepseek_v2": Family("deepseek_v2", latent=True, routing=Routing("softmax", normalize=False, group_score="max")),
    "deepseek_v3": Family("deepseek_v3", latent=True, routing=_DEEPSEEK3),
    "kimi_k2": Family("deepseek_v3", latent=True, routing=_DEEPSEEK3),
    "glm4_moe": Family(rotary_factor=0.5, output_bias=False, routing=_DEEPSEEK3),
    "gpt_oss": Family(
        context_length=131_072,
        num_kv_heads=8,
        head_dim=64,
        sliding="even",
        sliding_window=128,
        clamp=7.0,
        expert_size_key="intermediate_size",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_theta=150_000.0,
        sinks=True,
        routing=Routing("softmax_of_selected", bias=True),
    ),
    "llama4_text": Family(
        context_length=131_072,
        head_dim=128,
        sliding="chunks",
        rope_layers="listed",
        rope_theta=500_000.0,
        rope_interleaved=True,
        optional_head_norms="unit",
        uses_head_norms=True,
        temperature=True,
        expert_size_key="intermediate_size",
        routing=Routing("sigmoid", normalize=False, weights_on_input=True),
    ),
    "jamba": Family(
        positions="none",
        recurrence="mamba",
        step_norms="weighted",
        routing=Routing("softmax", normalize=False),
        expert_size_key="intermediate_size",
    ),
    "mamba": _MAMBA,
    "mamba2": replace(_MAMBA, recurrence="mamba2", tie_embeddings=False),
    "falcon_mamba": replace(_MAMBA, step_norms="plain"),
    "bamba": Family(mixer="recurrent", recurrence="mamba2", rotary_factor=0.5, norm_eps=1e-5),
    "granitemoehybrid": Family(
        positions="none",
        mixer="recurrent",
        recurrence="mamba2",
        dense_size_key="shared_intermediate_size",
        expert_size_key="intermediate_size",
    ),
    "falcon_h1": Family(mixer="both", recurrence="mamba2", norm_eps=1e-5),
    "qwen3_next": replace(_QWEN_NEXT, routing=Routing("softmax"), shared_gate=True),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
}


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family())


def register_model_type(model_type: str, family: Family) -> None:
    """Register a model type whose config defaults differ from those of `Family`."""
    if model_type in FAMILIES:
        raise UserError(f"model type '{model_type}' is already registered", "choose another name")
    FAMILIES[model_type] = family
