"""Layers for drafting that a checkpoint brings: drafts are those of the published forward pass, outputs stay.

The layer itself is transformers' own of the family; what is around it is written out here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.tiny_models import make, write_tokenizer
from tests.unit.runtime.speculation.published import GREEDY, OPTIONS, PROMPTS, check_drafts, run_recorded, whole
from tokenmill import LLM
from tokenmill.errors import CheckpointError, UserError

_QWEN = {"": "mtp.layers.0.", "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding"}
_QWEN |= {"hnorm": "mtp.pre_fc_norm_hidden", "shared_head.norm": "mtp.norm"}


class _Published:
    """A model, its file with a layer for drafting in it, and that layer's forward pass over all positions at once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.model = folder, make(name, folder)
        write_tokenizer(folder)
        self.offset = 1.0 if name.startswith("qwen") else 0.0
        self.eps = self.model.config.rms_norm_eps
        number = self.model.config.num_hidden_layers
        attentive = [layer for layer in self.model.model.layers if hasattr(layer, "self_attn")]
        torch.manual_seed(7)
        self.layer = copy.deepcopy(attentive[-1])
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(parameter[torch.randperm(len(parameter))])  # of the same size, but another layer
        place = self.layer.self_attn.layer_idx
        hidden = self.model.config.hidden_size
        norms = ("enorm", "hnorm", "shared_head.norm")
        self.own = {norm: torch.randn(hidden) * 0.2 + 1.0 - self.offset for norm in norms}
        self.own["eh_proj"] = torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5
        tensors = load_file(folder / "model.safetensors")
        stored = _stored_layer(self.layer, tensors, f"model.layers.{place}.")
        if self.offset:
            tensors |= {f"mtp.layers.0.{key}": each for key, each in stored.items()}
            tensors |= {f"{_QWEN[key]}.weight": each for key, each in self.own.items()}
        else:
            tensors |= {f"model.layers.{number}.{key}": each for key, each in stored.items()}
            tensors |= {f"model.layers.{number}.{key}.weight": each for key, each in self.own.items()}
            tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        save_file({key: each.contiguous() for key, each in tensors.items()}, folder / "model.safetensors")

    @torch.no_grad()
    def __call__(self, ids: list[int], depth: int) -> list[Tensor]:
        features = self.model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        tokens, chances = ids[1:], []
        for _ in range(depth):
            after = self._forward(features, torch.tensor(tokens))
            chances.append(self.model.lm_head(after[-1]).softmax(-1))
            features = torch.cat([features, after[-1:]])
            tokens = [*tokens, int(chances[-1].argmax())]
        return chances

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (self.own[name] + self.offset)

    def _forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        embedding = self.model.model.embed_tokens(tokens)
        both = torch.cat([self._norm("enorm", embedding), self._norm("hnorm", features)], -1)
        x = (both @ self.own["eh_proj"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, positions)
        y = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return self._norm("shared_head.norm", y[0] if isinstance(y, tuple) or y.dim() == 3 else y)


def _stored_layer(layer: Any, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """As the file keeps a layer: what transformers joins in memory (experts) is apart in the file."""
    state, stored = layer.state_dict(), {}
    for key in [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]:
        if key in state:
            stored[key] = state[key]
            continue
        experts, number, part, _ = key.rsplit(".", 3)  # mlp.experts.3.gate_proj.weight
        joined = state[f"{experts}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
        half = len(joined) // 2
        stored[key] = joined if part == "down_proj" else joined[:half] if part == "gate_proj" else joined[half:]
    return stored


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v3-yarn", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def published(request: Any, tmp_path_factory: pytest.TempPathFactory) -> _Published:
    return _Published(request.param, tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("executor", ["recorded", "eager"])
def test_drafts_of_the_own_layer(published: _Published, executor: str) -> None:
    options = {"executor": executor, "context": 96}
    with LLM(published.folder, **{**OPTIONS, **options}) as llm:
        expected = whole(llm.generate(PROMPTS, GREEDY))
    recorder, drafted, accepted = run_recorded(published.folder, "mtp", expected, **options)
    check_drafts(recorder.records, published)
    assert 10 < accepted < drafted


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="brings no layer for drafting"):
        LLM(tmp_path, speculate="mtp", **OPTIONS)
    with pytest.raises(UserError, match="takes no argument"):
        LLM(tmp_path, speculate="mtp:3", **OPTIONS)


def test_an_incomplete_layer_is_refused(tmp_path: Path) -> None:
    _Published("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.3.eh_proj"):
        LLM(tmp_path, speculate="mtp", **OPTIONS)
