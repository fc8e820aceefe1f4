"""What `tokenmill ray deploy FILE` reads: the file of `serve --config`, with a section `ray` about replicas.

    model: smollm2                 # or `models:`, and any option of `tokenmill serve`
    host: 0.0.0.0
    concurrency: 16
    tensor_parallel_size: 2        # ranks: a replica's placement group has room for all of them
    ray:
      min_replicas: 1
      max_replicas: 4
      target_queue: 4              # waiting requests per replica
      target_kv_use: 0.8
      cpus: 4                      # of a rank
      gpus: 1

Everything wrong with it is refused here, before a cluster is asked. Knows nothing of Ray itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tokenmill.errors import UserError, unknown_name
from tokenmill.plan.simulate.autoscaler import Autoscaling
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.fleet.catalog import Catalog, read_catalog

_SECTION = "ray"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_SIMULATED = ("cold_start_s",)  # of the autoscaler: on a cluster a cold start takes the time it takes
_ONE_WRITER = ("files_dir", "usage_file", "traffic_log")
_MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`options`: what the file says of the server itself, as replicas on any node read it."""

    options: dict[str, Any]
    file: str
    name: str = "tokenmill"
    route_prefix: str = "/"
    autoscaling: Autoscaling = field(default_factory=Autoscaling)
    cpus: float = 1.0  # of a rank
    gpus: float = 0.0  # of a rank
    ingress_replicas: int = 1
    surge_percent: int = 25  # replicas beyond the target while an upgrade runs, rounded up; 0: old ones end first
    ranks: int = 1

    def __post_init__(self) -> None:
        if not self.route_prefix.startswith("/"):
            raise UserError(f"route_prefix '{self.route_prefix}' is no path", "write it like /llm")
        for name, low in (("cpus", 0.0), ("gpus", 0.0), ("ingress_replicas", 1), ("surge_percent", 0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value < float("inf"):
                raise UserError(f"{name} of `ray` is {value!r}", f"give a number of at least {low:g}")

    def catalog(self) -> Catalog:
        options = dict(self.options)
        if self.route_prefix != "/" and not {"root_path", "root-path"} & set(options):
            options["root_path"] = self.route_prefix  # the proxy leaves it in the paths of requests
        model = options.pop("model", None)
        if model is not None and not isinstance(model, str):
            raise UserError(f"model in {self.file} is not a text", "give an alias, a Hugging Face id or a path")
        if model is None and "models" not in options:
            raise UserError(f"{self.file} names no model", "write `model: NAME`")
        return read_catalog([model] if model is not None else [], {}, options, self.file)

    @property
    def server(self) -> ServeConfig:
        return self.catalog().config

    @property
    def bundle(self) -> dict[str, float]:
        """What a replica asks for. One bundle, not one for each rank: ranks are processes of one engine, which sees
        the devices of the actor that started it, and one bundle always lies on one node."""
        found = {"CPU": self.cpus * self.ranks}
        return found | ({"GPU": self.gpus * self.ranks} if self.gpus else {})


def read_settings(values: Mapping[str, Any], file: str) -> RaySettings:
    section = values.get(_SECTION) or {}
    if not isinstance(section, Mapping):
        raise UserError(f"`ray` in {file} is no mapping", "write lines like `max_replicas: 4` under it")
    options = {str(name): value for name, value in values.items() if name != _SECTION}
    own = {each.name for each in fields(RaySettings)} - {"options", "file", "autoscaling", "ranks"}
    scaling = {each.name for each in fields(Autoscaling)} - set(_SIMULATED)
    for name in section:
        if name not in own | scaling:
            raise unknown_name(f"setting of `ray` in {file}", str(name), sorted(own | scaling))
    settings = RaySettings(
        options,
        file,
        autoscaling=Autoscaling(**{name: _number(section, name) for name in section if name in scaling}),
        ranks=_ranks(options),
        **{name: value for name, value in section.items() if name in own},
    )
    _check(settings)
    return settings


def _check(settings: RaySettings) -> None:
    config = settings.server
    several = settings.autoscaling.max_replicas > 1
    for name in _ONE_WRITER:
        if several and getattr(config, name):
            problem = f"{name} is given for {settings.autoscaling.max_replicas} replicas, which would all write there"
            raise UserError(problem, "leave it out, or give max_replicas: 1")
    if config.uds or config.ssl_certfile:
        raise UserError("a replica on Ray has no port of its own", "leave out uds and ssl_certfile: the proxy listens")


def _number(section: Mapping[str, Any], name: str) -> Any:
    value = section[name]
    whole = name.endswith("_replicas")
    if type(value) not in ((int,) if whole else (int, float)):
        raise UserError(f"{name} of `ray` is {value!r}", f"give a {'whole ' if whole else ''}number")
    return value


def _ranks(options: Mapping[str, Any]) -> int:
    """Processes of one engine. What they are is the engine's business: it refuses what it cannot do."""
    found = 1
    for name in _RANKS:
        value = options.get(name, options.get(name.replace("_", "-"), 1))
        if type(value) is not int or not 1 <= value <= _MAX_RANKS:
            raise UserError(f"{name} is {value!r}", "give a whole number of at least 1")
        found *= value
    return found
