"""Questions that the planner's tests ask."""

from __future__ import annotations

from typing import Any

from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.question.model_names import describe_for_planning
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.question import Limits, Question
from tokenmill.plan.question.workload import preset
from tokenmill.plan.search.answer import answer


def question(model: str, *gpus: str, use: str = "chat", load: dict[str, Any] | None = None, **fields: Any) -> Question:
    """`load` lays figures over the preset; `fields` are the Question's."""
    groups = [load_catalog().parse_gpu(each) for each in gpus]
    defaults: dict[str, Any] = {"pricing": Pricing(), "limits": Limits()}
    return Question(describe_for_planning(model), groups, preset(use, **(load or {})), **(defaults | fields))


def answered(model: str, *gpus: str, **fields: Any) -> dict[str, Any]:
    return answer(question(model, *gpus, **fields), load_catalog())
