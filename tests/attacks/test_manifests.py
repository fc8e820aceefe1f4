"""Deployment files are safe as they come (R10): every engine of ours, every target, read as data."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_engines import CPU
from tokenmill.deploy.render import find_engine, render


def _documents(target: str) -> list[dict[str, Any]]:
    files = render(target, find_engine("tokenmill"), CPU).files
    texts = [text for name, text in files.items() if name.endswith((".yaml", ".yml"))]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@pytest.fixture(scope="module")
def kubernetes() -> list[dict[str, Any]]:
    return _documents("kubernetes")


def _workload(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet")]
    pod: dict[str, Any] = found[0]["spec"]["template"]["spec"]
    return pod


def test_r10_keys_come_from_a_secret(kubernetes: list[dict[str, Any]]) -> None:
    pod = _workload(kubernetes)
    container = pod["containers"][0]
    words = " ".join(container.get("command", []) + container.get("args", []))
    variables = [each for each in container.get("env", []) if "API_KEY" in each["name"]]
    secret = any("secretKeyRef" in each.get("valueFrom", {}) for each in variables)
    file = "--api-keys-file" in words and any("secret" in each for each in pod.get("volumes", []))
    assert secret or file, "no key for a server on 0.0.0.0"
    assert "--api-key " not in words


def test_r10_a_container_has_no_rights_that_it_does_not_need(kubernetes: list[dict[str, Any]]) -> None:
    pod = _workload(kubernetes)
    container = pod["containers"][0]
    security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    assert security.get("runAsNonRoot") is True
    assert security.get("readOnlyRootFilesystem") is True
    assert security.get("allowPrivilegeEscalation") is False
    assert security.get("capabilities", {}).get("drop") == ["ALL"]
    assert pod.get("automountServiceAccountToken") is False


def test_r10_a_network_policy_says_who_may_talk(kubernetes: list[dict[str, Any]]) -> None:
    assert any(each["kind"] == "NetworkPolicy" for each in kubernetes)


def test_r10_the_grace_period_fits_the_shutdown(kubernetes: list[dict[str, Any]]) -> None:
    pod = _workload(kubernetes)
    container = pod["containers"][0]
    words = " ".join(container.get("command", []) + container.get("args", []))
    stated = re.search(r"--shutdown-timeout[ =](\d+)", words)
    timeout = int(stated[1]) if stated else 30
    assert timeout < pod["terminationGracePeriodSeconds"] <= timeout + 60
    assert "preStop" in container["lifecycle"]


def test_r10_liveness_and_readiness_ask_two_questions(kubernetes: list[dict[str, Any]]) -> None:
    container = _workload(kubernetes)["containers"][0]
    assert container["livenessProbe"] != container["readinessProbe"]
    assert "/livez" in yaml.safe_dump(container["livenessProbe"])
    assert "/readyz" in yaml.safe_dump(container["readinessProbe"])
    assert "startupProbe" in container


def test_r10_a_container_has_limits(kubernetes: list[dict[str, Any]]) -> None:
    resources = _workload(kubernetes)["containers"][0]["resources"]
    assert resources["requests"]["memory"]
    assert resources["limits"]["memory"]


def test_r10_the_scrape_has_a_key(kubernetes: list[dict[str, Any]]) -> None:
    monitors = [each for each in kubernetes if each["kind"] in ("ServiceMonitor", "PodMonitor")]
    for monitor in monitors:
        text = yaml.safe_dump(monitor)
        assert "authorization" in text or "bearerTokenSecret" in text, text


def test_r10_compose_needs_no_program_that_the_image_lacks() -> None:
    for document in _documents("compose"):
        for service in document["services"].values():
            assert "curl" not in yaml.safe_dump(service.get("healthcheck", {}))
            assert service.get("read_only") is True
            assert service.get("cap_drop") == ["ALL"]
            assert "no-new-privileges:true" in service.get("security_opt", [])


def test_r10_the_unit_is_fenced_in() -> None:
    files = render("systemd", find_engine("tokenmill"), CPU).files
    unit = next(text for name, text in files.items() if name.endswith(".service"))
    for line in ("NoNewPrivileges=", "ProtectSystem=", "PrivateTmp="):
        assert line in unit, unit
    assert "User=" in unit or "DynamicUser=" in unit
