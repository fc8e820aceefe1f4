"""What `tokenmill ray deploy` reads, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.errors import UserError
from tokenmill.ray.settings import read_settings


def test_the_file_is_that_of_serve_with_a_section() -> None:
    values = {
        "model": "smollm2",
        "port": 9000,
        "concurrency": 3,
        "ray": {"max_replicas": 7, "target_queue": 2.5, "cpus": 2},
    }
    found = read_settings(values, "f.yaml")
    catalog = found.catalog()
    assert catalog.config.port == 9000
    assert catalog.models[0].engine.concurrency == 3
    assert (found.autoscaling.max_replicas, found.autoscaling.target_queue) == (7, 2.5)
    assert found.bundle == {"CPU": 2}


def test_a_replica_asks_for_room_for_all_its_ranks() -> None:
    values = {"model": "smollm2", "tensor_parallel_size": 1, "ray": {"cpus": 4, "gpus": 1}}
    assert read_settings(values, "f").bundle == {"CPU": 4, "GPU": 1}
    from tokenmill.ray.settings import RaySettings

    assert RaySettings({}, "f", cpus=4, gpus=1, ranks=2).bundle == {"CPU": 8, "GPU": 2}


def test_replicas_know_the_prefix_of_their_routes() -> None:
    assert read_settings({"model": "m", "ray": {"route_prefix": "/llm"}}, "f").server.root_path == "/llm"
    assert (
        read_settings({"model": "m", "root_path": "/x", "ray": {"route_prefix": "/llm"}}, "f").server.root_path == "/x"
    )
    assert read_settings({"model": "m"}, "f").server.root_path == ""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"ray": {}}, "names no model"),
        ({"model": 3}, "not a text"),
        ({"model": "m", "ray": 3}, "no mapping"),
        ({"model": "m", "ray": {"max_replica": 3}}, "max_replica"),
        ({"model": "m", "ray": {"max_replicas": 2.5}}, "max_replicas"),
        ({"model": "m", "ray": {"min_replicas": 3, "max_replicas": 2}}, "from 3 to 2"),
        ({"model": "m", "ray": {"cpus": -1}}, "cpus"),
        ({"model": "m", "ray": {"route_prefix": "llm"}}, "no path"),
        ({"model": "m", "ray": {"target_queue": "many"}}, "target_queue"),
        ({"model": "m", "prot": 3}, "prot"),
        ({"model": "m", "tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"model": "m", "usage_file": "u.json", "price": "1"}, "usage_file"),
        ({"model": "m", "uds": "/tmp/s"}, "no port of its own"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_settings(values, "f.yaml")
