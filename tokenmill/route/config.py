"""The router's options: one frozen record, turned into flags and variables as those of the server are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from tokenmill.config import by_option_name, check, from_environment, option, option_fields
from tokenmill.errors import UserError, unknown_name
from tokenmill.route.policies import POLICIES

_SECRETS = ("replica_key", "upstream_key", "admin_key")


@dataclass(frozen=True, slots=True)
class RouteConfig:
    replica: tuple[str, ...] = option((), "URL of a tokenmill server. Repeatable.", metavar="URL")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.", metavar="ADDRESS")
    port: int = option(8080, "Port to listen on; 0 picks a free one.", metavar="PORT", low=0, high=65535)
    policy: str = option(
        "least_wait", "Which replica takes a request; as --router of `tokenmill simulate`.", metavar="NAME"
    )
    weights: tuple[str, ...] = option(
        (),
        "Share of the requests that a replica gets, such as http://10.0.0.9:8000=0.05 for a canary; the policy divides "
        "the rest. Repeatable.",
        metavar="URL=SHARE",
    )
    tokenizer_of: str = option(
        "",
        "Model whose tokenizer finds cached prompts: alias, Hugging Face id or path. By default the replicas' own, "
        "where its path exists here too.",
        metavar="MODEL",
    )
    replica_key: str = option(
        "", "API key for the replicas' events; it needs the right to operate them (admin).", metavar="KEY"
    )
    admin_key: str = option("", "Key for /router and /metrics; without one only this machine may ask.", metavar="KEY")
    allowed_host: tuple[str, ...] = option(
        (), "Host name that requests may be addressed to, or *.NAME. Repeatable; by default any, loopback names only "
        "where the router listens on the loopback address.", metavar="NAME"
    )  # fmt: skip
    upstream: str = option(
        "", "OpenAI-compatible URL that takes requests which no replica can take; none by default.", metavar="URL"
    )
    upstream_key: str = option("", "API key for it; callers' keys are never sent there.", metavar="KEY")
    upstream_model: str = option("", "Model name for it, instead of the request's.", metavar="NAME")
    connect_timeout: float = option(2.0, "Time to reach a replica.", metavar="SECONDS", low=0.01)
    dead_after: float = option(
        5.0,
        "Silence after which a replica counts as dead, and its streams go on elsewhere.",
        metavar="SECONDS",
        low=0.1,
    )
    resume_timeout: float = option(
        30.0,
        "Time that a broken stream waits for a replica that can go on with it, and that a stream may bring no token "
        "before it counts as broken.",
        metavar="SECONDS",
        low=0,
    )
    max_body_bytes: int = option(8 << 20, "Maximum size of a request body.", metavar="BYTES", low=1)
    shutdown_timeout: float = option(30.0, "Time that requests in flight have after SIGTERM.", metavar="SECONDS", low=0)

    def __post_init__(self) -> None:
        for spec in option_fields(RouteConfig):
            value = getattr(self, spec.name)
            if spec.metadata["kind"] is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, spec.name, value)
            check(spec, value)
        if not self.replica:
            raise UserError("no replica is given", "give --replica URL, once for each")
        object.__setattr__(self, "replica", tuple(_checked_url(each, "--replica") for each in self.replica))
        if len(set(self.replica)) != len(self.replica):
            raise UserError("a replica is given twice", "give each --replica once")
        if self.policy not in POLICIES:
            raise unknown_name("policy", self.policy, POLICIES.names())
        if self.upstream:
            object.__setattr__(self, "upstream", _checked_url(self.upstream, "--upstream").removesuffix("/v1"))
        self.shares()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RouteConfig:
        specs = option_fields(cls)
        plain = [spec for spec in specs if spec.name not in ("host", "port")]  # those are the server's variables
        stated = {name: value for name, (value, _source) in from_environment(plain, os.environ).items()}
        return cls(**(stated | by_option_name(options, specs)))

    def shares(self) -> dict[str, float]:
        """URL -> its share of the requests."""
        found: dict[str, float] = {}
        for each in self.weights:
            url, _, text = each.rpartition("=")
            url = url.rstrip("/")
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if url not in self.replica or not 0 <= share <= 1:
                raise UserError(f"--weights {each} is not a share of a replica", "write URL=SHARE with 0 to 1")
            found[url] = share
        if sum(found.values()) > 1:
            raise UserError("the shares of --weights are more than 1", "lower some")
        return found

    def shown(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SECRETS}


def _checked_url(text: str, flag: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username:
        raise UserError(f"{flag} {text} is not a URL of a server", "write it like http://10.0.0.5:8000")
    return text.rstrip("/")
