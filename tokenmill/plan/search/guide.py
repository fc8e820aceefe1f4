"""The decision guide: which rules of thumb apply to a question and its answer, and whether the plan follows them.

Rules are data (plan/data/guide.toml) with conditions over a flat set of facts; this module collects the facts and
matches. It explains, it does not decide: the search does. Called by `tokenmill plan --explain` and the report.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tokenmill.errors import unknown_name
from tokenmill.hardware.catalog import Device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.ceilings import decode_ceiling
from tokenmill.plan.question.question import Question

_SECONDS_PER_MONTH = 730 * 3600


@dataclass(frozen=True, slots=True)
class Rule:
    rule: str
    topic: str
    when: Mapping[str, Any]
    text: str
    source: str
    corrects: str = ""
    prefers: tuple[str, ...] = ()


@cache
def load_rules() -> tuple[Rule, ...]:
    text = (resources.files("tokenmill.plan") / "data" / "guide.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["rule"]
    return tuple(Rule(**{**row, "prefers": tuple(row.get("prefers", ()))}) for row in rows)


def trait_names() -> list[str]:
    """What a user can say of the use that no figure tells (`--trait`)."""
    return sorted({trait for rule in load_rules() for trait in rule.when.get("traits", ())})


def check_traits(traits: Sequence[str]) -> None:
    for trait in traits:
        if trait not in trait_names():
            raise unknown_name("trait", trait, trait_names())


def explain_plan(question: Question, result: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rules that apply, as rows: rule, topic, text, what is often claimed instead, source."""
    facts = plan_facts(question, result)
    return [_row(rule, facts) for rule in load_rules() if applies(rule, facts)]


def applies(rule: Rule, facts: Mapping[str, Any]) -> bool:
    return all(_holds(name, wanted, facts) for name, wanted in rule.when.items())


def _holds(name: str, wanted: Any, facts: Mapping[str, Any]) -> bool:
    if name.endswith("_below"):
        return bool(facts[name.removesuffix("_below")] < wanted)
    if name.endswith("_at_least"):
        return bool(facts[name.removesuffix("_at_least")] >= wanted)
    fact = facts[name]
    if isinstance(fact, tuple):
        return bool(set(fact) & set(wanted))
    return fact in wanted if isinstance(wanted, list) else bool(fact == wanted)


def _row(rule: Rule, facts: Mapping[str, Any]) -> dict[str, str]:
    text = rule.text.format(**facts)
    if rule.prefers:
        followed = facts["weights"] in rule.prefers
        text += (
            " This plan follows it."
            if followed
            else f" This plan departs from it with {facts['weights']}"
            + (", which is cheaper within the promises: weigh its quality range." if facts["feasible"] else ".")
        )
    row = {"rule": rule.rule, "topic": rule.topic, "text": text, "source": rule.source}
    return row | ({"corrects": rule.corrects.format(**facts)} if rule.corrects else {})


def plan_facts(question: Question, result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a condition or a text may name."""
    plan, workload = result["plan"], question.workload
    device = next(group.device for group in question.groups if group.device.name == plan["device"])
    return {
        **_device_facts(device),
        **_model_facts(question, device, plan),
        "feasible": result["feasible"],
        "weights": plan["weights"],
        "quantized": plan["weights"] not in ("bf16", "fp32", question.model.stored_format),
        "kv_bits": plan["kv_bits"],
        "kv_tokens": plan["kv_tokens"],
        "kv_gib": plan["memory_gib_per_device"]["kv"],
        "engine": plan["engine"],
        "tp": plan["tp"],
        "pp": plan["pp"],
        "devices": plan["devices"],
        "replicas": plan["replicas"],
        "requests_that_fit": plan["requests_that_fit"],
        "users": plan["users_per_replica"],
        "users_total": plan["users_per_replica"] * plan["replicas"],
        "max_num_seqs": plan["settings"]["max_num_seqs"],
        "max_num_batched_tokens": plan["settings"]["max_num_batched_tokens"],
        "input_tokens": workload.input_tokens,
        "prefix_share": workload.prefix_share,
        "rate": workload.rate,
        "ttft_ms": workload.ttft_ms,
        "itl_ms": workload.itl_ms,
        "traits": question.traits,
        "priced": "per_million_output" in result["costs"],
        "utilization": question.pricing.utilization,
        "tokens_per_month": plan["output_tok_s"]["value"]
        * workload.total_tokens
        / workload.output_tokens
        * question.pricing.utilization
        * _SECONDS_PER_MONTH,
    }


def _device_facts(device: Device) -> dict[str, Any]:
    return {
        "device": device.name,
        "kind": device.kind,
        "edge": device.kind == "phone" or (device.kind == "soc" and device.family != "apple"),
        "family": device.family,
        "vendor": device.vendor,
        "memory_gb": device.memory_gb,
        "fp8": device.supports("fp8"),
        "link": device.link.kind,
        "link_devices": device.link.devices,
    }


def _model_facts(question: Question, device: Device, plan: Mapping[str, Any]) -> dict[str, Any]:
    model = question.model
    kinds = model.mixer_kinds
    return {
        "parameters": model.parameters,
        "billions": model.parameters / 1e9,
        "active_billions": model.active_parameters / 1e9,
        "moe": model.is_moe,
        "latent": "latent" in kinds,
        "recurrent": "recurrent" in kinds,
        "sliding": "sliding" in kinds,
        "vision": model.description.vision_parameters > 0,
        "kv_bytes_per_token": model.kv_bytes_per_token(1, plan["kv_bits"] / 8),
        "ceiling": decode_ceiling(model, find_format(plan["weights"]), device, plan["tp"]),
    }
