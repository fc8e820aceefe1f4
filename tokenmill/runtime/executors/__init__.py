"""The executors, fastest first. Each may decline a model or store with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.kernels.host import NeedsTorch, on_host
from tokenmill.registry import Registry

if TYPE_CHECKING:
    from tokenmill.config import ResolvedConfig
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.model.loader import LoadedModel
    from tokenmill.runtime.executors.base import Executor

EXECUTORS = Registry(
    "executor",
    {
        "cuda_graph": "tokenmill.runtime.executors.cuda.graph:CudaGraphExecutor",
        "cuda_eager": "tokenmill.runtime.executors.cuda.eager:CudaEagerExecutor",
        "recorded": "tokenmill.runtime.executors.recorded:RecordedExecutor",
        "eager": "tokenmill.runtime.executors.eager:EagerExecutor",
    },
)


def choose_executor(
    name: str, model: LoadedModel, store: KVStore, config: ResolvedConfig
) -> tuple[Executor[Any], tuple[tuple[str, str], ...]]:
    """The named executor, or with "auto" the first that does not decline."""
    if name != "auto" and name not in EXECUTORS:
        raise unknown_name("executor", name, ["auto", *EXECUTORS])
    declined: list[tuple[str, str]] = []
    automatic = ("recorded",) if on_host(model.device) else EXECUTORS
    for candidate in automatic if name == "auto" else (name,):
        executor_class = EXECUTORS.get(candidate)
        reason = executor_class.declines(model, store)
        if reason is None:
            executor: Executor[Any] = executor_class(model, store, config)
            return executor, tuple(declined)
        declined.append((candidate, reason))
    if on_host(model.device):
        raise NeedsTorch(declined[-1][1])
    raise UserError(f"executor '{name}' cannot run here: {declined[-1][1]}", "use --executor auto")
