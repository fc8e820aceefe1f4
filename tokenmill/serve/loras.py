"""Adapters as models: which names there are, who may use them, who may load them and from where.

Strangers are kept out twice: loading needs a key with the right to it, and files come only from directories that the
operator named, wherever links lead. What a key may not use does not exist for it. The engine process reads the files;
this side knows names. Knows nothing of HTTP shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenmill.engine.adapters.registry import IN_USE, NOT_FOUND, check_name
from tokenmill.engine.messages import AdapterAnswer, AdapterInfo
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Member
from tokenmill.serve.metrics import Metrics
from tokenmill.serve.supervision.engine import Engine
from tokenmill.serve.tenants.keys import Client
from tokenmill.types import AdapterRef

_log = get_logger(__name__)
_LATEST = ":latest"  # Ollama's
OTHER = "other"  # label of the adapters beyond the bound
_STATUS = {NOT_FOUND: 404, IN_USE: 409}


class Loras:
    def __init__(self, names: Sequence[str], engine: Engine, metrics: Metrics, config: ServeConfig) -> None:
        """`names`: of the base."""
        self._names = tuple(names)
        self._engine = engine
        self._metrics = metrics
        self._folders = tuple(Path(each).expanduser().resolve() for each in config.lora_dir)
        self.is_taken: Callable[[str], bool] = lambda _name: False  # by another model, or one of its adapters
        self._max_labels = config.max_metric_loras
        self._labels: set[str] = set()

    # --- names ---

    def check_model(self, name: str | None, client: Client | None = None) -> str:
        """The model name of the response; without a name in the request, the first served one."""
        if name is None or self._is_base(name):
            return name or self._names[0]
        if name not in self._engine.adapters.by_name or (client is not None and not client.may_use(name)):
            raise self._unknown(name)
        return name

    def find(self, name: str | None, client: Client) -> AdapterRef | None:
        """The adapter of this name, if there is one and the key may use it; raises if the name means nothing."""
        if name is None or self._is_base(name):
            return None
        adapter = self._engine.adapters.by_name.get(name)
        if adapter is None or not client.may_use(name):
            raise self._unknown(name)
        return AdapterRef(adapter.name, adapter.digest)

    def _is_base(self, name: str) -> bool:
        return name in self._names or name.removesuffix(_LATEST) in self._names

    def visible_to(self, client: Client) -> list[AdapterInfo]:
        return [adapter for name, adapter in sorted(self._engine.adapters.by_name.items()) if client.may_use(name)]

    def _unknown(self, name: str) -> ApiError:
        shown = name[:100].encode("ascii", "replace").decode()
        problem = f"model '{shown}' is not served here: use '{self._names[0]}'"
        return ApiError(404, problem, param="model", code="model_not_found")

    # --- changes ---

    async def load(self, name: str, path: str, in_place: bool, client: Client) -> AdapterInfo:
        self._check_right(client)
        try:
            check_name(name)
        except UserError as error:
            raise ApiError(400, str(error), param="lora_name") from None
        if not client.may_use(name):  # it could replace an adapter of others
            raise ApiError(
                403, f"this key may not use an adapter called '{name}'", param="lora_name", code="lora_right"
            )
        if self._is_base(name):
            raise ApiError(400, f"'{name}' is the name of the base model: choose another", param="lora_name")
        if self.is_taken(name):
            raise ApiError(400, f"'{name}' is the name of another model: choose another", param="lora_name")
        try:
            folder = await asyncio.to_thread(self._allowed, path)
        except (OSError, ValueError):  # too long, with a zero byte, not readable
            raise ApiError(404, "there is no such adapter directory", param="lora_path", code=NOT_FOUND) from None
        answer = await self._engine.adapters.load(name, str(folder), in_place)
        if answer.adapter is None:
            raise _error(answer, "lora_path")
        _log.warning("adapter '%s' was loaded from %s by key '%s'", name, folder, client.name)
        return answer.adapter

    async def unload(self, name: str, drains: bool, client: Client) -> None:
        self._check_right(client)
        if name not in self._engine.adapters.by_name or not client.may_use(name):
            raise ApiError(404, f"adapter '{name[:100]}' is not loaded", param="lora_name", code=NOT_FOUND)
        answer = await self._engine.adapters.unload(name, drains)
        if answer.error:
            raise _error(answer, "lora_name")
        _log.warning("adapter '%s' was unloaded by key '%s'", name, client.name)

    def _check_right(self, client: Client) -> None:
        if not self._folders:
            raise ApiError(403, "adapters cannot be changed here: start the server with --lora-dir", code="lora_dir")
        if not client.changes_loras:
            raise ApiError(403, "this key may not load or unload adapters", code="lora_right")

    def _allowed(self, path: str) -> Path:
        """The directory that is meant, as links lead to it, if it is within one that the operator named. Whether
        anything exists elsewhere is not told."""
        for base in self._folders:
            folder = (base / path).resolve()  # an absolute path stands for itself
            if not folder.is_relative_to(base) or not folder.is_dir():
                continue
            files = [each.resolve() for each in folder.iterdir()]
            if not all(any(each.is_relative_to(inside) for inside in self._folders) for each in files):
                raise ApiError(403, f"{path} links to files outside the allowed directories", param="lora_path")
            return folder
        if Path(path).is_absolute() and not any(Path(path).resolve().is_relative_to(base) for base in self._folders):
            raise ApiError(403, "lora_path is outside the directories of --lora-dir", param="lora_path")
        raise ApiError(404, f"there is no adapter directory {path[:200]}", param="lora_path", code=NOT_FOUND)

    # --- metrics ---

    def on_end(self, member: Member) -> None:
        """Count a request of an adapter that was computed, wholly or not."""
        adapter = member.request.adapter
        if adapter is None or member.first_token is None:
            return
        label = self._label(adapter.name)
        num_output = sum(len(each.token_ids) for each in member.output.outputs)
        self._metrics.add("adapter_requests", 1.0, label)
        self._metrics.add("adapter_prompt_tokens", len(member.output.prompt_token_ids), label)
        self._metrics.add("adapter_generation_tokens", num_output, label)

    def _label(self, name: str) -> str:
        """The adapter's name, for as many as there may be; a label once given stays."""
        if name not in self._labels and len(self._labels) >= self._max_labels:
            return OTHER
        self._labels.add(name)
        return name


def _error(answer: AdapterAnswer, param: str) -> ApiError:
    return ApiError(_STATUS.get(answer.code, 400), answer.error, param=param, code=answer.code or None)
