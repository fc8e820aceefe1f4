"""What others hear of an engine: who is told what it did, and what a refused request is told."""

from __future__ import annotations

from typing import Protocol

from tokenmill.engine.adapters.registry import NOT_FOUND
from tokenmill.engine.messages import Refused
from tokenmill.engine.stats import EngineStats
from tokenmill.serve.errors import ApiError, deadline_passed
from tokenmill.serve.generation import Member


class Observer(Protocol):
    """Receives what the engine did: metrics and admission."""

    def on_step(self, stats: EngineStats) -> None: ...

    def on_tokens(self, member: Member, num_tokens: int) -> None: ...

    def on_end(self, member: Member) -> None: ...

    def on_restart(self, reason: str) -> None: ...


def refusal(message: Refused) -> ApiError:
    """A request that the engine did not take."""
    if message.code == "deadline":
        return deadline_passed()
    if message.code == NOT_FOUND:  # the engine's message names all adapters, which not every key may know
        return ApiError(404, "the model was unloaded: ask for another", param="model", code="model_not_found")
    return ApiError(400, message.message)
