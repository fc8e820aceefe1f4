"""Valid inputs to start from: small files of every format, templates, grammars, schemas and request bodies.

Made here, so that the fuzzer needs no download. Used by doors.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from tests.unit.checkpoint.gguf_builder import FFN, HEADS, HIDDEN, KV_HEADS, layer_shapes
from tests.unit.checkpoint.vocabularies import byte_level, sentencepiece
from tokenmill.checkpoint.gguf_writer import GGUFWriter, TensorSlot, pack_value

CONFIGS: list[dict[str, Any]] = [
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": [2, 3],
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    },
    {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "vocab_size": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
    {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    {
        "model_type": "deepseek_v3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 1.0, "original_max_position_embeddings": 4096},
    },
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64},
    {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "model_type": "gemma3_text",
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "head_dim": 8,
        },
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32},
    },
]
TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- set ns = namespace(found=false, last=messages|length - 1) %}{%- for m in messages %}"
    "{%- if m.role == 'system' and loop.first %}{{ m.content }}{%- elif m.tool_calls is defined %}"
    "{{ m.tool_calls | tojson(indent=2) }}{%- else %}[INST] {{ m.content }} [/INST]{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}{% endif %}",
    "{% macro part(p) %}{{ p.text if p is mapping else p }}{% endmacro %}{% for m in messages %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ part(p) }}{% endfor %}{% endif %}"
    "{% endfor %}{% if messages|length > 9 %}{{ raise_exception('too many') }}{% endif %}"
    "{{ strftime_now('%d %b %Y') }}{{ range(3) | list }}{{ 'a' * 3 }}{{ 'x'.join(['1', '2']) }}{{ 2 ** 10 }}",
]
GRAMMARS = [
    'start: "yes" | "no" | sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n',
    'start: object\nobject: "{" [pair ("," pair)*] "}"\npair: STRING ":" value\nvalue: STRING | object | NUMBER\n'
    'STRING: "\\"" /[a-z ]*/ "\\""\nNUMBER: /-?[0-9]{1,5}/\n%ignore / /\n',
    'start: word{2,5} "."\nword: /[a-z]+/ " "\n',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}\n',
    'root ::= expr "\\n"\nexpr ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" expr ")"\n',
    'root ::= "a"{1,3} (b | c)*\nb ::= [^x-z"\\\\] | "b"\nc ::= ("c" "d"?)+ # comment\n',
]
REGEXES = [
    r"[a-z]+@[a-z]+\.(com|org)",
    r"^(?:[01]\d|2[0-3]):[0-5]\d$",
    r"(a|b)*c{2,5}[^\n]?",
    r"\p{L}+ \w{1,8}(?i:end)",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
    r"(?P<year>\d{4})-(?:0[1-9]|1[0-2])",
]
SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 4},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"const": 1}}}},
        "$ref": "#/$defs/node",
    },
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "number", "multipleOf": 0.5}, {"type": "null"}]},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "string"}], "items": False},
    {"allOf": [{"type": "object"}, {"properties": {"x": {"type": "number", "exclusiveMinimum": 0}}}]},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "And 2 + 2?"}]},
]
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_SAMPLING = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["\n"], "n": 1, "logprobs": None}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two", **_SAMPLING, "echo": False, "top_k": 5, "logit_bias": {"5": -1}}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "stream": True, "priority": 0}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "min_p": 0.1, "structured_outputs": {"regex": "[ab]+"}}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "temperature": 0, "presence_penalty": 0.5}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES[1:2],
            "max_tokens": 2,
            "tools": [_TOOL],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES[1:2],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[0]}},
        },
    ),
    ("/v1/embeddings", {"input": ["a text", "another"], "encoding_format": "float"}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 2, "system": "Be brief.", "messages": MESSAGES[1:3]}),
    ("/tokenize", {"prompt": "one two three", "add_special_tokens": True}),
    ("/tokenize", {"messages": MESSAGES[:2], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/api/generate", {"prompt": "one", "stream": False, "options": {"num_predict": 2, "temperature": 0}}),
    ("/api/chat", {"messages": MESSAGES[:2], "stream": True, "options": {"num_predict": 2, "seed": 3}}),
]


def write_gguf(path: Path, architecture: str, vocabulary: str = "gpt2") -> bytes:
    """A model of one layer that can be opened, tokenized with and served."""
    pairs: dict[str, Any] = {"general.architecture": architecture, "general.name": "tiny", "general.alignment": 32}
    sizes = {"block_count": 1, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    heads = {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    numbers = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0}
    pairs |= {f"{architecture}.{name}": value for name, value in {**sizes, **heads, **numbers}.items()}
    pairs |= (
        byte_level() if vocabulary == "gpt2" else sentencepiece({"▁a": -1.0, "▁": -2.0, "ab": -3.0}, eos_token_id=2)
    )
    pairs["tokenizer.chat_template"] = TEMPLATES[0]
    shapes = {f"blk.0.{name}.weight": shape for name, shape in layer_shapes(architecture).items()}
    shapes |= {"token_embd.weight": (len(pairs["tokenizer.ggml.tokens"]), HIDDEN), "output_norm.weight": (HIDDEN,)}
    slots = [TensorSlot(name, shape, "Q8_0" if len(shape) == 2 else "F32") for name, shape in shapes.items()]
    generator = np.random.default_rng(0)
    with GGUFWriter(path, {name: pack_value(value) for name, value in pairs.items()}, slots) as writer:
        for slot in slots:
            values = generator.normal(0, 0.1, slot.shape).astype(np.float32)
            data = quantize(values, gguf.GGMLQuantizationType.Q8_0) if slot.type_name == "Q8_0" else values
            writer.append(torch.from_numpy(data.reshape(slot.shape[0], -1).view(np.uint8)))
    return path.read_bytes()


def safetensors_header() -> tuple[dict[str, Any], bytes]:
    """A tensor table with several types, and the data after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, size in (
        ("model.embed_tokens.weight", "F32", [64, 32], 4),
        ("model.norm.weight", "BF16", [32], 2),
        ("model.layers.0.self_attn.q_proj.weight", "F16", [32, 32], 2),
        ("model.layers.0.mlp.up_proj.qweight", "I32", [4, 48], 4),
        ("model.layers.0.mlp.up_proj.g_idx", "I64", [32], 8),
        ("model.layers.1.flag", "BOOL", [], 1),
    ):
        count = size
        for length in shape:
            count *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + count]}
        position += count
    return header, bytes(position)


def tokenizer_documents() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, and BPE with spaces as in SentencePiece."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = {chr(code): code - 33 for code in range(33, 127)} | {"Ġ": 94, "he": 95, "hel": 96}
    merges = [("h", "e"), ("he", "l")]
    plain = Tokenizer(models.BPE(vocab=letters, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 97)])
    pieces = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<0x0A>": 5}
    spaced = Tokenizer(models.BPE(vocab=pieces, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaced.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "add_bos_token": True,
        "added_tokens_decoder": {
            "99": {"content": "<tool>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        },
        "chat_template": [
            {"name": "default", "template": TEMPLATES[0]},
            {"name": "tool_use", "template": TEMPLATES[1]},
        ],
        "eos_token_id": [1, 2],
    }
    other = {"bos_token": None, "eos_token": "b", "chat_template": TEMPLATES[2], "add_eos_token": False}
    return [(json.loads(plain.to_str()), settings), (json.loads(spaced.to_str()), other)]
