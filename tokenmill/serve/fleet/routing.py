"""The name in a request -> the model that answers it. The one place where names are looked up.

A name is a model's own, an alias, or a split, which divides its requests among models by weight: in every run of
requests each model has its share to within one request. Ollama's `:latest` is understood. A key sees only the models
that it may use: others do not exist for it. Knows names and rights; fleet.py knows which models are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenmill.serve.errors import ApiError
from tokenmill.serve.tenants.keys import Client

LATEST = ":latest"
_MAX_LISTED = 20  # names in an error


class Routes:
    def __init__(self, models: Iterable[tuple[str, ...]], splits: Mapping[str, Mapping[str, float]]) -> None:
        """`models`: the names of each, its own first."""
        self._own: dict[str, str] = {}  # every name -> that of the model
        self._splits = {name: dict(shares) for name, shares in splits.items()}
        self._credit = {name: dict.fromkeys(shares, 0.0) for name, shares in splits.items()}
        self.default = ""
        for names in models:
            self.add(names)

    def add(self, names: tuple[str, ...]) -> None:
        self.default = self.default or names[0]
        self._own.update(dict.fromkeys(names, names[0]))

    def __contains__(self, name: str) -> bool:
        return name in self._own or name in self._splits

    def knows(self, name: str) -> bool:
        """Whether a request by this name means a model or a split."""
        return name in self or name.removesuffix(LATEST) in self

    def own(self, name: str) -> str:
        """The own name of a model, or of the first of a split; `name` must be known."""
        return self._own[name] if name in self._own else next(iter(self._splits[name]))

    def names(self, client: Client) -> list[tuple[str, str]]:
        """(name, own name of its model) of all that this key may use; a split has the first of its models."""
        found = [(name, own) for name, own in self._own.items() if may_use(client, own)]
        for name, shares in self._splits.items():
            usable = [model for model in shares if may_use(client, model)]
            found += [(name, usable[0])] if usable else []
        return found

    def find(self, name: str | None, client: Client) -> str:
        """The model that answers; without a name the first that the key may use. Raises ApiError 404."""
        if name is None:
            usable = next((own for own in self._own.values() if may_use(client, own)), None)
            if usable is None:
                raise self._unknown("", client)
            return usable
        known = name if name in self else name.removesuffix(LATEST)
        if known in self._splits:
            return self._next(known, client, name)
        own = self._own.get(known)
        if own is None or not may_use(client, own):
            raise self._unknown(name, client)
        return own

    def all_of(self, name: str | None, client: Client) -> list[str]:
        """The models of which one would answer; none: nobody would. Takes no turn of a split."""
        known = name if name is None or name in self else name.removesuffix(LATEST)
        found = [own for own in self._own.values() if may_use(client, own)][:1]
        if known is not None:
            found = list(self._splits.get(known, ())) or [self._own[known]] if known in self else []
        return [own for own in found if may_use(client, own)]

    def split_names(self, own: str) -> tuple[str, ...]:
        """The splits that a model is part of."""
        return tuple(name for name, shares in self._splits.items() if own in shares)

    def _next(self, split: str, client: Client, asked: str) -> str:
        """Smooth weighted round robin over the models that the key may use."""
        shares = {model: share for model, share in self._splits[split].items() if share and may_use(client, model)}
        if not shares:
            raise self._unknown(asked, client)
        credit = self._credit[split]
        for model, share in shares.items():
            credit[model] += share
        chosen = max(shares, key=lambda model: credit[model])
        credit[chosen] -= sum(shares.values())
        return chosen

    def _unknown(self, name: str, client: Client) -> ApiError:
        names = [f"'{each}'" for each, _ in self.names(client)]
        listed = ", ".join(names[:_MAX_LISTED]) + (" and others" if len(names) > _MAX_LISTED else "")
        shown = name[:100].encode("ascii", "replace").decode()
        problem = f"model '{shown}' is not served here: use {listed or 'another key, this one may use no model'}"
        return ApiError(404, problem, param="model", code="model_not_found")


def may_use(client: Client, model: str) -> bool:
    return not client.models or client.admin or model in client.models
