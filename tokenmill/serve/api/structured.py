"""Constraints on the output (JSON, regex, choice, grammar): from the fields of a body to sampling parameters.

The single place where a constraint joins the sampling parameters. Only its size and form are checked here; the engine
process compiles it in a thread and rejects what cannot be used. Called by sampling.py.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tokenmill.errors import UserError
from tokenmill.serve.api.protocol import Structured
from tokenmill.serve.errors import ApiError
from tokenmill.types import SamplingParams, StructuredSpec


def constrain(params: SamplingParams, wanted: Structured) -> SamplingParams:
    try:
        return replace(params, structured=_spec(wanted))
    except UserError as error:
        raise ApiError(400, str(error), param="response_format") from None


def _spec(wanted: Structured) -> StructuredSpec:
    if wanted.kind == "choice":
        return StructuredSpec("choice", choices=tuple(msgspec.json.decode(wanted.value, type=list[str])))
    return StructuredSpec(wanted.kind, wanted.value)
