"""Published EAGLE heads: their drafts are those of the published forward pass, and no output changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.parity.tiny_models import write_tokenizer
from tests.unit.runtime.speculation.published import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    Recorder,
    check_drafts,
    run_recorded,
    whole,
)
from tokenmill import LLM, SamplingParams
from tokenmill.errors import CheckpointError, UserError

_VOCAB, _HIDDEN, _DRAFTED, _HEADS, _KV_HEADS, _HEAD_DIM = 131, 64, 40, 4, 2, 16
_LAYERS, _THETA, _EPS = 8, 10000.0, 1e-6
_KEPT = (2, 4, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, intermediate_size=96, num_hidden_layers=_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def expected(target: tuple[Path, Any]) -> list[list[int]]:
    with LLM(target[0], **OPTIONS) as llm:
        return whole(llm.generate(PROMPTS, GREEDY))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5 if len(shape) > 1 else 1.0 + 0.2 * torch.randn(shape)


def _layer(prefix: str, width: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, width),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, width),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (80, _HIDDEN),
        "mlp.up_proj": (80, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 80),
        "post_attention_layernorm": (_HIDDEN,),
    }
    return {f"{prefix}.{name}.weight": _random(*shape) for name, shape in shapes.items()}


def _eagle3() -> dict[str, Tensor]:
    torch.manual_seed(11)
    tensors = _layer("midlayer", 2 * _HIDDEN)
    tensors |= {f"midlayer.{name}.weight": _random(_HIDDEN) for name in ("input_layernorm", "hidden_norm")}
    chosen = torch.randperm(_VOCAB)[:_DRAFTED].sort().values
    known = torch.zeros(_VOCAB, dtype=torch.bool)
    known[chosen] = True
    return tensors | {
        "fc.weight": _random(_HIDDEN, 3 * _HIDDEN),
        "norm.weight": _random(_HIDDEN),
        "lm_head.weight": 4 * _random(_DRAFTED, _HIDDEN),
        "d2t": chosen - torch.arange(_DRAFTED),
        "t2d": known,
    }


def _eagle1() -> dict[str, Tensor]:
    torch.manual_seed(12)
    tensors = _layer("layers.0", _HIDDEN)
    return tensors | {
        "fc.weight": _random(_HIDDEN, 2 * _HIDDEN),
        "fc.bias": 0.1 * torch.randn(_HIDDEN),
        "embed_tokens.weight": _random(_VOCAB, _HIDDEN),
    }


def _config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 80,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": _EPS,
        "rope_theta": _THETA,
        "max_position_embeddings": 256,
        "vocab_size": _VOCAB,
        "draft_vocab_size": _DRAFTED,
        "hidden_act": "silu",
        **changes,
    }


def _write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(**changes)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt() * weight


def _turned(x: Tensor, heads: int) -> Tensor:
    """Rotary positions 0, 1, ... of [T, heads * head_dim] -> [heads, T, head_dim]."""
    half = _HEAD_DIM // 2
    angles = torch.outer(torch.arange(len(x)).float(), _THETA ** (-torch.arange(half) / half))
    a, b = x.view(len(x), heads, 2, half).permute(1, 2, 0, 3).unbind(1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _attention(t: dict[str, Tensor], x: Tensor) -> Tensor:
    q = _turned(linear(x, t["self_attn.q_proj.weight"]), _HEADS)
    k = _turned(linear(x, t["self_attn.k_proj.weight"]), _KV_HEADS).repeat_interleave(_HEADS // _KV_HEADS, 0)
    v = linear(x, t["self_attn.v_proj.weight"]).view(len(x), _KV_HEADS, _HEAD_DIM).transpose(0, 1)
    v = v.repeat_interleave(_HEADS // _KV_HEADS, 0)
    later = torch.ones(len(x), len(x)).triu(1).bool()
    scores = (q @ k.transpose(1, 2) * _HEAD_DIM**-0.5).masked_fill(later, -torch.inf)
    return linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), t["self_attn.o_proj.weight"])


def _mlp(t: dict[str, Tensor], x: Tensor) -> Tensor:
    inner = silu(linear(x, t["mlp.gate_proj.weight"])) * linear(x, t["mlp.up_proj.weight"])
    return linear(inner, t["mlp.down_proj.weight"])


class _Reference:
    """The whole draft computed anew for every draft, over all positions at once."""

    def __init__(
        self, model: Any, tensors: dict[str, Tensor], kept: tuple[int, ...] = (), before: bool = False
    ) -> None:
        self.model, self.kept, self.before = model, kept, before
        self.t = {name.removeprefix("midlayer.").removeprefix("layers.0."): each for name, each in tensors.items()}

    @torch.no_grad()
    def __call__(self, ids: list[int], depth: int) -> list[Tensor]:
        known = self.model.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        if self.kept:
            states = torch.cat([known.hidden_states[layer][0] for layer in self.kept], -1)
            features = linear(states, self.t["fc.weight"])
        else:
            features = known.last_hidden_state[0]  # behind the final norm
        tokens, chances = ids[1:], []
        for _ in range(depth):
            after = self._forward(features, torch.tensor(tokens))
            chances.append(self._chances(after[-1]))
            features = torch.cat([features, after[-1:]])
            tokens = [*tokens, int(chances[-1].argmax())]
        return chances

    def _forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        t = self.t
        table = t.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        if self.kept:
            normed = _norm(features, t["hidden_norm.weight"])
            read = torch.cat([_norm(table[tokens], t["input_layernorm.weight"]), normed], -1)
            residual = normed if self.before else features
        else:
            read = residual = linear(torch.cat([table[tokens], features], -1), t["fc.weight"], t["fc.bias"])
        residual = residual + _attention(t, read)
        return residual + _mlp(t, _norm(residual, t["post_attention_layernorm.weight"]))

    def _chances(self, state: Tensor) -> Tensor:
        if not self.kept:
            return self.model.lm_head(state).softmax(-1)
        chances = torch.zeros(_VOCAB)
        own = linear(_norm(state, self.t["norm.weight"]), self.t["lm_head.weight"]).softmax(-1)
        chances[torch.arange(_DRAFTED) + self.t["d2t"]] = own
        return chances


@pytest.mark.parametrize("executor", ["recorded", "eager"])
@pytest.mark.parametrize("case", ["plain", "named layers", "residual"])
def test_eagle3(target: Any, expected: list[list[int]], tmp_path: Path, executor: str, case: str) -> None:
    tensors, kept = _eagle3(), _KEPT
    changes: dict[str, Any] = {}
    if case == "named layers":
        kept, changes = (1, 6, 3), {"eagle_aux_hidden_state_layer_ids": [1, 6, 3]}
    if case == "residual":
        kept, changes = (1, 4, 6), {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}}
        changes["norm_before_residual"] = True
    head = _write(tmp_path, tensors, **changes)
    recorder, drafted, accepted = run_recorded(target[0], f"head:{head}", expected, executor=executor)
    check_drafts(recorder.records, _Reference(target[1], tensors, kept, case == "residual"))
    assert 10 < accepted < drafted


def test_eagle1(target: Any, expected: list[list[int]], tmp_path: Path) -> None:
    tensors = _eagle1()
    head = _write(tmp_path, tensors)
    recorder, drafted, accepted = run_recorded(target[0], f"head:{head}", expected)
    check_drafts(recorder.records, _Reference(target[1], tensors))
    assert 10 < accepted < drafted


def _page_bytes(model: Path) -> int:
    with LLM(model, **OPTIONS) as llm:
        return llm.parts.runtime.budget.page_bytes


def test_chunks_and_preemption(target: Any, expected: list[list[int]], tmp_path: Path) -> None:
    """Prompts in pieces, and too few pages for all sequences: what is computed again is kept again."""
    tensors = _eagle3()
    head = _write(tmp_path, tensors)
    options = {"batch_tokens": 16, "memory": 36 * _page_bytes(target[0]), "prefix_caching": False}
    recorder, _, _ = run_recorded(target[0], f"head:{head}", expected, **options)
    assert recorder.num_preemptions > 0
    check_drafts(recorder.records, _Reference(target[1], tensors, _KEPT))


def test_shared_prefixes(target: Any, tmp_path: Path) -> None:
    """Keys of a shared prefix are shared; the last one of it depends on the token behind it, and is masked if that is
    another one."""
    head = _write(tmp_path, _eagle3())
    with LLM(target[0], speculate=f"head:{head}", **OPTIONS) as llm:
        drafter = Recorder(llm, []).drafter
        del drafter.draft  # as it was
        masked: list[int] = []
        read = drafter.memory.read

        def watched(rows: Any, lengths: Any, room: int) -> Any:
            context = read(rows, lengths, room)
            masked.extend((~context.mask[n, :length]).sum().item() for n, length in enumerate(lengths))
            return context

        drafter.memory.read = watched
        llm.generate(PROMPTS[0], GREEDY)
        assert set(masked) == {0}
        masked.clear()
        llm.generate(PROMPTS[0], GREEDY)  # the whole prompt again
        assert set(masked) == {0}
        masked.clear()
        llm.generate(PROMPTS[2], GREEDY)  # 22 of its tokens: 5 pages, the last key was followed by the same token
        assert set(masked) == {0}
        masked.clear()
        other = " ".join(PROMPTS[0].split()[:20]) + " w9 w9 w9 w9 w9"
        llm.generate(other, GREEDY)
        assert set(masked) == {1}


def test_seeds_and_siblings(target: Any, tmp_path: Path) -> None:
    head = _write(tmp_path, _eagle3())
    params = [SamplingParams(temperature=0.9, seed=4, max_tokens=16), SamplingParams(temperature=1.1, seed=2, n=2)]
    with LLM(target[0], **OPTIONS) as llm:
        plain = whole(llm.generate(PROMPTS[:2], params))
    with LLM(target[0], speculate=f"head:{head}", **OPTIONS) as llm:
        assert whole(llm.generate(PROMPTS[:2], params)) == plain


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vocab_size": 99}, "vocabulary of 99 tokens, the model has 131"),
        ({"num_hidden_layers": 2}, "has 2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}, "reads layers 1, 2, 30 of a model with 8"),
        ({"missing": "midlayer.hidden_norm.weight"}, "fc.weight of the head"),
        ({"missing": "midlayer.mlp.up_proj.weight"}, "has no tensor mlp.up_proj.weight"),
        ({"missing": "fc.weight"}, "has no tensor fc.weight"),
        ({"missing": "lm_head.weight"}, "has no tensor lm_head.weight"),
        ({"added": "layers.1.mlp.up_proj.weight"}, "that are not read: layers.1.mlp.up_proj.weight"),
        ({"narrow": "fc.weight"}, r"fc.weight of the head in .* is \[64, 191\], this model needs \[64, 192\]"),
        ({"shifted": "d2t"}, "d2t of the head in .* names tokens"),
    ],
)
def test_what_does_not_fit_is_refused(target: Any, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    tensors = _eagle3()
    tensors.pop(change.pop("missing", ""), None)
    if "added" in change:
        tensors[change.pop("added")] = torch.zeros(2, 2)
    if "narrow" in change:
        tensors["fc.weight"] = tensors.pop(change.pop("narrow"))[:, 1:]
    if "shifted" in change:
        tensors["d2t"] = tensors.pop(change.pop("shifted")) + 100
    head = _write(tmp_path, tensors, **change)
    with pytest.raises((UserError, CheckpointError), match=problem) as error:
        LLM(target[0], speculate=f"head:{head}", **OPTIONS)
    assert "\n" not in str(error.value)


def test_pickled_weights_are_refused(target: Any, tmp_path: Path) -> None:
    head = _write(tmp_path, _eagle3())
    torch.save(_eagle3(), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only pickled weights"):
        LLM(target[0], speculate=f"head:{head}", **OPTIONS)
