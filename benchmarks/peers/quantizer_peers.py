"""One quantizer of the field on one model: runs in the environment of that peer, imports nothing of ours.

    python quantizer_peers.py auto-round MODEL OUT --text FILE --bits 4 --group 32 [--asymmetric] [--device cuda] ...

Every peer gets the same token sequences (the text cut into sequences of --length, as its own tokenizer makes them), the
same bits, groups and symmetry, and otherwise its own defaults. Prints one line of JSON. What a peer cannot write in a
form that others read is expanded to floats: the weights are then exactly what it would compute with. Called by
quantizers.py, which also knows how to install each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


class Job:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model, self.out = str(arguments.model), str(arguments.out)
        self.bits, self.group, self.symmetric = arguments.bits, arguments.group, not arguments.asymmetric
        self.device = arguments.device
        self._text, self._samples, self._length = arguments.text, arguments.samples, arguments.length

    def sequences(self) -> list[list[int]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        ids = tokenizer(self._text.read_text(encoding="utf-8"))["input_ids"]
        count = min(self._samples, len(ids) // self._length)
        step = (len(ids) - self._length) // max(1, count - 1)
        return [ids[index * step : index * step + self._length] for index in range(count)]

    def load(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(self.model)

    def batches(self) -> list[Any]:
        import torch

        return [torch.tensor([ids]) for ids in self.sequences()]


def auto_round(job: Job) -> None:
    from auto_round import AutoRound

    model, tokenizer = job.load()
    batches = job.batches()
    quantizer = AutoRound(
        model,
        tokenizer,
        bits=job.bits,
        group_size=job.group,
        sym=job.symmetric,
        dataset=batches,
        nsamples=len(batches),
        seqlen=batches[0].shape[1],
        device_map=job.device,
        enable_torch_compile=False,
    )
    quantizer.quantize_and_save(job.out, format="auto_gptq")
    _lift(Path(job.out))


def hqq(job: Job) -> None:
    """Its zero points are real numbers, whatever --asymmetric says."""
    import torch
    from hqq.core.quantize import Quantizer

    model, tokenizer = job.load()
    settings = {"nbits": job.bits, "group_size": job.group, "axis": 1, "round_zero": job.bits == 4}
    for name, linear in _linears(model):
        weight = linear.weight.data.to(job.device, copy=True)
        codes, meta = Quantizer.quantize(weight, compute_dtype=torch.float32, device=job.device, **settings)
        linear.weight.data = Quantizer.dequantize(codes, meta).to("cpu", torch.float32).view_as(linear.weight)
        assert torch.isfinite(linear.weight).all(), name
    _save(model, tokenizer, job.out)


def torchao(job: Job) -> None:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

    model, tokenizer = job.load()
    model.to(job.device)
    mapping = MappingType.SYMMETRIC if job.symmetric else MappingType.ASYMMETRIC
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{job.bits}"), granularity=PerGroup(job.group), mapping_type=mapping
    )
    quantize_(model.model.layers, config)
    for _, linear in _linears(model):
        linear.weight = torch.nn.Parameter(linear.weight.dequantize().float().cpu(), requires_grad=False)
    _save(model, tokenizer, job.out)


def llm_compressor(job: Job, method: str) -> None:
    """Takes a GPU by itself where there is one."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    model, tokenizer = job.load()
    weights = {
        "num_bits": job.bits,
        "type": "int",
        "symmetric": job.symmetric,
        "strategy": "group",
        "group_size": job.group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    rounding = {"config_groups": groups, "ignore": ["lm_head"]}
    recipe = [GPTQModifier(**rounding)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**rounding)]
    sequences = job.sequences()
    data = Dataset.from_dict({"input_ids": sequences, "attention_mask": [[1] * len(ids) for ids in sequences]})
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=len(sequences[0]),
        num_calibration_samples=len(sequences),
    )
    model.save_pretrained(job.out, save_compressed=True)
    tokenizer.save_pretrained(job.out)


def gptqmodel(job: Job) -> None:
    if job.device == "cpu":
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with its default on two cores, one, it does not start
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=job.bits, group_size=job.group, sym=job.symmetric, device=job.device)
    model = GPTQModel.load(job.model, config)
    sequences = job.sequences()
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in sequences], batch_size=1)
    model.save(job.out)


def _linears(model: Any) -> list[tuple[str, Any]]:
    """Of the blocks, as every peer here leaves the head alone."""
    import torch

    return [(name, each) for name, each in model.model.layers.named_modules() if isinstance(each, torch.nn.Linear)]


def _lift(out: Path) -> None:
    """auto-round names a folder of its own inside the one that it is given: its files belong here."""
    for config in out.glob("*/config.json"):
        for file in config.parent.iterdir():
            file.rename(out / file.name)
        config.parent.rmdir()


def _save(model: Any, tokenizer: Any, out: str) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


PEERS = {
    "auto-round": auto_round,
    "hqq": hqq,
    "torchao": torchao,
    "llm-compressor-gptq": lambda job: llm_compressor(job, "gptq"),
    "llm-compressor-awq": lambda job: llm_compressor(job, "awq"),
    "gptqmodel": gptqmodel,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--samples", type=int, default=47)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    started = time.monotonic()
    PEERS[arguments.peer](Job(arguments))
    print(json.dumps({"seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
