"""Deployments are safe as they come: keys from a secret, no root, a read-only file system, a stop that fits."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_engines import CPU, H100
from tests.unit.deploy.test_targets import documents, serving_for
from tokenmill.deploy.cluster import Cluster
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.hardening import GRACE_SECONDS, PRE_STOP_SECONDS, STOP_SECONDS, has_keys
from tokenmill.deploy.render import find_engine, render
from tokenmill.deploy.serving import SHUTDOWN_SECONDS
from tokenmill.errors import UserError
from tokenmill.serve.tenants.key_file import load_keys


def objects(name: str, **changes: Any) -> dict[str, dict[str, Any]]:
    engine = find_engine(name)
    text = render("kubernetes", engine, replace(serving_for(engine), **changes)).files["serving.yaml"]
    return {each["kind"]: each for each in documents(text)}


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = objects(name)["Deployment"]["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("name", ENGINES.names())
def test_pods_run_without_root_on_a_read_only_file_system(name: str) -> None:
    spec = pod(name)
    container = spec["containers"][0]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert isinstance(spec["securityContext"]["runAsUser"], int)
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    home = next(variable["value"] for variable in container["env"] if variable["name"] == "HOME")
    assert {"/tmp", home, "/models"} <= mounted
    limits = container["resources"]["limits"]
    assert {"memory", "ephemeral-storage"} <= set(limits)
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])


@pytest.mark.parametrize("name", ENGINES.names())
def test_no_pod_listens_without_the_keys_of_a_secret(name: str) -> None:
    engine, spec = find_engine(name), pod(name)
    container = spec["containers"][0]
    secret = f"{serving_for(engine).name}-api-keys"
    if engine.keys_file_flag:
        volume = next(each for each in spec["volumes"] if each["name"] == "keys")
        assert volume["secret"]["secretName"] == secret
        assert "optional" not in volume["secret"]
        path = container["args"][container["args"].index(engine.keys_file_flag) + 1]
        mount = next(each for each in container["volumeMounts"] if each["name"] == "keys")
        assert path == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    elif engine.key_variable:
        variable = next(each for each in container["env"] if each["name"] == engine.key_variable)
        assert variable["valueFrom"]["secretKeyRef"] == {"name": secret, "key": "key"}
    else:
        notes = render("kubernetes", engine, serving_for(engine)).notes
        assert any("no API keys" in note for note in notes)
    text = yaml.safe_dump_all(objects(name).values())
    assert "kind: Secret" not in text
    assert "sk-" not in text


def test_prometheus_has_a_key_of_its_own() -> None:
    endpoint = objects("tokenmill")["ServiceMonitor"]["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"] == {"name": "model-1b-api-keys", "key": "metrics"}
    assert "authorization" not in objects("vllm")["ServiceMonitor"]["spec"]["endpoints"][0]  # its metrics are open


def test_a_stop_fits_the_time_that_requests_get() -> None:
    spec = pod("tokenmill")
    container = spec["containers"][0]
    shutdown = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert shutdown == SHUTDOWN_SECONDS
    assert wait == PRE_STOP_SECONDS
    assert spec["terminationGracePeriodSeconds"] == GRACE_SECONDS >= wait + shutdown + 10
    compose = yaml.safe_load(render("compose", find_engine("tokenmill"), CPU).files["compose.yaml"])
    assert compose["services"]["model-1b"]["stop_grace_period"] == f"{STOP_SECONDS}s"
    unit = render("systemd", find_engine("tokenmill"), CPU).files["model-1b.service"]
    assert f"TimeoutStopSec={STOP_SECONDS}\n" in unit
    assert shutdown < STOP_SECONDS


def test_a_reload_is_not_a_death() -> None:
    container = pod("tokenmill")["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert pod("vllm")["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("name", ENGINES.names())
def test_the_network_policy_opens_one_port(name: str) -> None:
    policy = objects(name)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    labels = objects(name)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"protocol": "TCP", "port": find_engine(name).port}]]
    assert all("from" in rule for rule in policy["ingress"])
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443}
    assert "169.254.0.0/16" in policy["egress"][1]["to"][0]["ipBlock"]["except"]


def test_a_model_on_the_volume_needs_no_internet() -> None:
    policy = objects("tokenmill", model="/models/tiny.gguf")["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53}


@pytest.mark.parametrize("name", ENGINES.names())
def test_compose_services_are_confined(name: str) -> None:
    engine = find_engine(name)
    found = yaml.safe_load(render("compose", engine, serving_for(engine)).files["compose.yaml"])
    for service in found["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith("0")
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        if engine.health_tool == "python" and (engine.health_sees_progress or engine.live):
            assert "curl" not in " ".join(service["healthcheck"]["test"])
        if engine.keys_file_flag:
            assert service["secrets"] == ["api-keys"]
            assert "/run/secrets/api-keys" in service["command"]
        elif engine.key_variable:
            assert service["environment"][engine.key_variable].startswith(f"${{{engine.key_variable}:?")


@pytest.mark.parametrize("name", ENGINES.names())
def test_units_are_confined(name: str) -> None:
    engine = find_engine(name)
    serving = replace(serving_for(engine), replicas=1)
    unit = render("systemd", engine, serving).files[f"{serving.name}.service"]
    for line in (
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "PrivateTmp=yes",
        "Restart=on-failure",
    ):
        assert f"\n{line}\n" in unit
    if engine.keys_file_flag:
        assert f"\nLoadCredential=api-keys:/etc/{serving.name}/api-keys\n" in unit
        assert "--api-keys-file %d/api-keys" in unit
    elif engine.key_variable:
        assert f"\nEnvironmentFile=/etc/{serving.name}/api-keys\n" in unit


def test_created_keys_are_ones_the_server_takes(tmp_path: Path) -> None:
    script = render("compose", find_engine("tokenmill"), CPU).files["create-keys.sh"]
    run = ["sh", "-c", script]
    subprocess.run(run, cwd=tmp_path, check=True)
    text = (tmp_path / "api-keys.yaml").read_text()
    keys = re.findall(r"sk-[0-9a-f]{48}", text)
    assert len(set(keys)) == 2
    ring = load_keys((), str(tmp_path / "api-keys.yaml"))
    client = ring.find(keys[0])
    assert client is not None
    assert client.name == "client"
    assert (tmp_path / "api-keys.yaml").stat().st_mode & 0o077 == 0
    subprocess.run(run, cwd=tmp_path, check=True)  # keys in use are never replaced
    assert (tmp_path / "api-keys.yaml").read_text() == text


def test_created_secrets_hold_the_keys(tmp_path: Path) -> None:
    """With a kubectl that records its arguments."""
    (tmp_path / "kubectl").write_text('#!/bin/sh\n[ "$1" = get ] && exit 1\nprintf "%s\\n" "$@" > called\n')
    (tmp_path / "kubectl").chmod(0o755)
    for name, wanted in (("tokenmill", "--from-literal=keys.yaml=keys:"), ("vllm", "--from-literal=key=sk-")):
        engine = find_engine(name)
        script = render("kubernetes", engine, serving_for(engine)).files["create-keys.sh"]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, env=environment)
        called = (tmp_path / "called").read_text()
        assert f"{serving_for(engine).name}-api-keys" in called
        assert wanted in called


@pytest.mark.parametrize("name", [name for name in ENGINES.names() if has_keys(find_engine(name))])
def test_a_launch_script_without_a_key_stops(name: str) -> None:
    engine = find_engine(name)
    script = render("command", engine, serving_for(engine)).files["launch.sh"]
    guard = next(line for line in script.splitlines() if line.startswith(': "$'))
    done = subprocess.run(["sh", "-c", guard], env={}, capture_output=True, check=False)
    assert done.returncode != 0
    assert b"API key" in done.stderr


@pytest.mark.parametrize("name", ["tokenmill", "vllm", "llamacpp", "ollama", "trtllm"])
def test_names_reach_the_shell_as_one_word(name: str) -> None:
    engine = find_engine(name)
    weights = {"vllm": "int4-g128", "trtllm": "nvfp4"}.get(name, "q4_k_m")
    base = serving_for(engine)
    model = "org/x; touch $(pwned) 'y'"
    prepare = render("kubernetes", engine, replace(base, model=model, weights=weights, stored="bf16")).prepare
    assert model in [word for line in prepare for word in shlex.split(line.replace("||", " "), comments=True)]
    for wrong in ("--flag", "two\nlines", ""):
        with pytest.raises(UserError, match="no model name"):
            render("kubernetes", engine, replace(base, model=wrong))


def test_split_pools_are_closed_to_others() -> None:
    found = documents(render("kubernetes", find_engine("vllm"), H100, Cluster(split=(1, 1))).files["split.yaml"])
    policy = next(each for each in found if each["kind"] == "NetworkPolicy")["spec"]
    peers = policy["ingress"][1]["from"][0]["podSelector"]["matchLabels"]
    for each in found:
        if each["kind"] in ("StatefulSet", "Deployment"):
            template = each["spec"]["template"]
            assert peers.items() <= template["metadata"]["labels"].items()
            assert template["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
