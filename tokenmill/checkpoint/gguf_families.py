"""Architectures of GGUF files: which of ours computes each, and what llama.cpp's code or its converter fixes unsaid.

Facts only, by `general.architecture`; read by gguf_description.py and gguf_names.py, and the other way by
gguf_export.py. Where llama.cpp approximates a model (the tanh gelu for all, no window in Phi-3), the model's own way is
kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    architecture: str  # in model/architectures
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1), because q and k rows were reordered or are so by nature
    latent: bool = False  # latent attention
    recurrent: str = ""  # the style of recurrent layers, where there are no others
    hybrid: str = ""  # the same where other layers have attention
    side_by_side: bool = False  # all layers have both
    norm: str = "rms"
    norms: str = "pre"  # as in LayerDescription; "": by the norms that the file has
    post_attention_norm: bool = False  # the norm before the MLP has the name of one behind attention
    head_norms: str = ""
    optional_head_norms: str = ""  # where the file has them
    output_gate: bool = False  # of attention
    gated: bool = True
    activation: str = "silu"
    fused_mlp: bool = False  # `ffn_up` holds gate and up
    fused_qkv: bool = False  # llama.cpp reads `attn_qkv` only
    # Which layers slide where there is a window: "never", "all", or "period" (all but every n-th).
    sliding: str = "all"
    window: int = 0  # where the key is absent
    period: int = 0
    theta: float = 1e4
    local_theta: bool = False  # sliding layers have a rotary table of their own, unscaled
    default_local_theta: float = 0.0  # 0: as the full layers
    rope_layers: str = "all"  # "all" | "sliding" | "all but every 4th"
    positions: str = "rope"
    optional_rope: bool = False  # Granite: `rope.scaling.finetuned` says whether there is any
    scales_embedding: bool = False  # by the root of the hidden size
    logit_scale: str = ""  # "multiplies" | "divides": what `logit_scale` does
    softcaps: bool = False  # of scores and logits; llama.cpp ignores the keys elsewhere
    scale_by_head: bool = False  # q.k is multiplied by head_dim ** -0.5, stated
    odd_layers: int = 0  # of the one size whose query scale is from hidden size / heads instead
    norm_offset: float = 0.0  # of norms in Hugging Face files; a GGUF has it added
    overflows_float16: bool = False
    names_vocabulary: bool = False  # converters write `vocab_size` and `rope.dimension_count`
    names_head_size: bool = False  # and `attention.key_length`
    names_parallel: bool = False  # and `use_parallel_residual`


_GEMMA = GGUFFamily(
    "gemma",
    activation="gelu_tanh",
    sliding="never",
    scales_embedding=True,
    norm_offset=1.0,
    overflows_float16=True,
    names_head_size=True,
)
_GEMMA2 = replace(
    _GEMMA,
    architecture="gemma2",
    softcaps=True,
    norms="sandwich",
    sliding="period",
    window=4096,
    period=2,
    scale_by_head=True,
    odd_layers=46,
)
_COHERE = GGUFFamily(
    "cohere", interleaved=True, norm="layer", norms="parallel", optional_head_norms="heads", logit_scale="multiplies"
)
_GLM4 = GGUFFamily("glm4", interleaved=True, norms="sandwich", fused_mlp=True)
_LLAMA = GGUFFamily("llama", interleaved=True, names_vocabulary=True)
_LAYER_NORMS = GGUFFamily("", norm="layer", gated=False)

FAMILIES: dict[str, GGUFFamily] = {
    "llama": _LLAMA,  # Mistral too
    "mistral3": _LLAMA,
    "qwen2": GGUFFamily("qwen2", sliding="never"),  # Qwen files carry a window that their models do not use
    "qwen3": GGUFFamily("qwen3", sliding="never", head_norms="head", names_head_size=True),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        architecture="gemma3",
        head_norms="head",
        window=0,
        period=6,
        theta=1e6,
        local_theta=True,
        default_local_theta=1e4,
        odd_layers=62,
    ),
    "phi3": GGUFFamily("phi3", fused_mlp=True),
    "olmo2": GGUFFamily("olmo2", norms="post", head_norms="projection", sliding="period", period=4, local_theta=True),
    "granite": GGUFFamily(
        "granite", interleaved=True, logit_scale="divides", names_vocabulary=True, optional_rope=True
    ),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, architecture="cohere2", sliding="period", period=4, rope_layers="sliding"),
    "smollm3": GGUFFamily("smollm3", interleaved=True, rope_layers="all but every 4th"),
    "chatglm": replace(_GLM4, architecture="glm", norms="pre"),
    "glm4": _GLM4,
    "starcoder2": replace(_LAYER_NORMS, architecture="starcoder2", activation="gelu_tanh"),
    "stablelm": replace(
        _LAYER_NORMS, architecture="stablelm", gated=True, norms="", optional_head_norms="heads", names_parallel=True
    ),
    "gptneox": replace(
        _LAYER_NORMS,
        architecture="gpt_neox",
        norms="parallel_norms",
        activation="gelu",
        fused_qkv=True,
        names_parallel=True,
    ),
    "gpt2": replace(_LAYER_NORMS, architecture="gpt2", activation="gelu_tanh", positions="learned", fused_qkv=True),
    "falcon": replace(_LAYER_NORMS, architecture="falcon", norms="", activation="gelu", fused_qkv=True),
    "qwen2moe": GGUFFamily("qwen2_moe", sliding="never"),
    "qwen3moe": GGUFFamily("qwen3_moe", sliding="never", head_norms="head", names_head_size=True),
    "olmoe": GGUFFamily("olmoe", head_norms="projection"),
    "granitemoe": GGUFFamily(
        "granitemoe", interleaved=True, logit_scale="divides", names_vocabulary=True, optional_rope=True
    ),
    "glm4moe": GGUFFamily("glm4_moe", optional_head_norms="head", post_attention_norm=True, names_head_size=True),
    "gpt-oss": GGUFFamily(
        "gpt_oss",
        sliding="period",
        period=2,
        window=128,
        theta=150_000.0,
        post_attention_norm=True,
        names_head_size=True,
    ),
    "llama4": GGUFFamily("llama4_text", interleaved=True, rope_layers="all but every 4th"),
    "deepseek2": GGUFFamily("deepseek_v3", latent=True, sliding="never", names_vocabulary=True),  # V2 too
    "mamba": GGUFFamily("mamba", recurrent="mamba", sliding="never", positions="none"),  # Falcon-Mamba too
    "mamba2": GGUFFamily("mamba2", recurrent="mamba2", sliding="never", positions="none"),
    "jamba": GGUFFamily("jamba", hybrid="mamba", sliding="never", positions="none"),
    "falcon-h1": GGUFFamily(
        "falcon_h1",
        hybrid="mamba2",
        side_by_side=True,
        sliding="never",
        names_vocabulary=True,
        names_head_size=True,
    ),
    "qwen3next": GGUFFamily(
        "qwen3_next",
        hybrid="delta",
        sliding="never",
        head_norms="head",
        norm_offset=1.0,
        output_gate=True,
        post_attention_norm=True,
        names_head_size=True,
    ),
    "granitehybrid": GGUFFamily(
        "granitemoehybrid",
        interleaved=True,
        hybrid="mamba2",
        sliding="never",
        logit_scale="divides",
        names_vocabulary=True,
        optional_rope=True,
    ),
    "phi2": replace(_LAYER_NORMS, architecture="phi", norms="parallel", activation="gelu_tanh"),
}
# Written under the name of another: their files differ in what the metadata says.
_STORED_AS = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "deepseek_v2": "deepseek2"}
_STORED_AS |= {"falcon_mamba": "mamba"}
STORED_AS = {family.architecture: name for name, family in reversed(FAMILIES.items())} | _STORED_AS
