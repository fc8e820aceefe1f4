"""Manifests checked by real checkers: published Kubernetes schemas, systemd's own verifier; probes that see a hang."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.deploy.schemas import check
from tests.unit.deploy.test_engines import CPU, H100, H200
from tokenmill.deploy.cluster import Cluster
from tokenmill.deploy.engines import ENGINES
from tokenmill.deploy.engines.base import Engine
from tokenmill.deploy.probes import progress_script
from tokenmill.deploy.render import TARGETS, find_engine, render
from tokenmill.deploy.serving import Serving
from tokenmill.deploy.split import parse_split
from tokenmill.errors import UserError


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def serving_for(engine: Engine) -> Serving:
    return H100 if engine.can_split and engine.name != "tokenmill" else CPU


@pytest.mark.parametrize("name", ENGINES.names())
@pytest.mark.parametrize("scaler", ["keda", "hpa"])
def test_kubernetes_objects_are_valid(name: str, scaler: str) -> None:
    engine = find_engine(name)
    files = render("kubernetes", engine, serving_for(engine), Cluster(scaler=scaler)).files
    kinds = {check(each) for file, text in files.items() if file.endswith(".yaml") for each in documents(text)}
    wanted = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy"}
    if engine.signals is not None:
        wanted |= {"ServiceMonitor", "ScaledObject" if scaler == "keda" else "HorizontalPodAutoscaler"}
    assert wanted <= kinds
    assert not {"ScaledObject", "HorizontalPodAutoscaler"} <= kinds  # two masters of one Deployment


@pytest.mark.parametrize("scaler", ["keda", "hpa"])
def test_our_own_pods_ask_for_one_gpu_each(scaler: str) -> None:
    rendered = render("kubernetes", find_engine("tokenmill"), H200, Cluster(scaler=scaler))
    found = [each for file, text in rendered.files.items() if file.endswith(".yaml") for each in documents(text)]
    assert {"Deployment", "ServiceMonitor"} <= {check(each) for each in found}
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert container["image"].endswith("-cuda")
    assert container["args"][:4] == ["serve", "org/model-8b", "--device", "cuda"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == "1"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert any("device plugin" in note for note in rendered.notes)


def test_pods_without_a_gpu_tolerate_no_gpu_node() -> None:
    found = documents(render("kubernetes", find_engine("tokenmill"), CPU).files["serving.yaml"])
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    assert "tolerations" not in deployment["spec"]["template"]["spec"]


def test_our_own_services_and_units_have_a_gpu_each() -> None:
    engine = find_engine("tokenmill")
    services = yaml.safe_load(render("compose", engine, H200).files["compose.yaml"])["services"]
    reserved = [each["deploy"]["resources"]["reservations"]["devices"][0] for each in services.values()]
    assert [each["device_ids"] for each in reserved] == [["0"], ["1"]]
    units = render("systemd", engine, H200).files
    for replica in (0, 1):
        unit = units[f"model-8b-{replica}.service"]
        assert f"CUDA_VISIBLE_DEVICES={replica}" in unit
        assert f"--port {8000 + replica}" in unit
        assert "PrivateDevices" not in unit


def test_the_schema_check_can_fail() -> None:
    engine = find_engine("vllm")
    deployment = documents(render("kubernetes", engine, H100).files["serving.yaml"])[2]
    deployment["spec"]["replicass"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)


def test_scaling_waits_five_minutes_before_it_shrinks() -> None:
    for scaler in ("keda", "hpa"):
        (scaled, *_) = documents(
            render("kubernetes", find_engine("vllm"), H100, Cluster(scaler=scaler)).files["autoscaling.yaml"]
        )
        spec = scaled["spec"]
        behavior = (
            spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] if scaler == "keda" else spec["behavior"]
        )
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] < 60
        text = yaml.safe_dump_all(documents(render("kubernetes", find_engine("vllm"), H100, Cluster(scaler=scaler))
                                            .files["autoscaling.yaml"]))  # fmt: skip
        assert "vllm:num_requests_waiting" in text
        assert "vllm:kv_cache_usage_perc" in text


def test_a_slow_load_is_no_failed_start() -> None:
    big = replace(H100, weight_bytes=140 * 10**9)
    deployment = documents(render("kubernetes", find_engine("vllm"), big).files["serving.yaml"])[2]
    probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300 + 140 / 0.2


@pytest.mark.parametrize("name", ["tokenmill", "vllm", "sglang", "trtllm"])
def test_split_pools_are_valid_and_joined(name: str) -> None:
    engine = find_engine(name)
    serving = replace(H100, tp=1) if name == "tokenmill" else H100  # ours has no ranks on GPUs
    found = documents(render("kubernetes", engine, serving, Cluster(split=(1, 2))).files["split.yaml"])
    assert [check(each) for each in found].count("StatefulSet") == 2
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in found if each["kind"] == "StatefulSet"}
    assert replicas == {"model-70b-prefill": 1, "model-70b-decode": 2}
    text = yaml.safe_dump_all(found)
    for host in ("model-70b-prefill-0.model-70b-prefill", "model-70b-decode-1.model-70b-decode"):
        assert host in text
    headless = [each for each in found if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"]
    assert len(headless) == 2


def test_splits_are_checked() -> None:
    assert parse_split("2:3") == (2, 3)
    for text in ("2", "0:1", "a:b"):
        with pytest.raises(UserError, match="is not a split"):
            parse_split(text)
    with pytest.raises(UserError, match="need a cluster"):
        render("compose", find_engine("vllm"), H100, Cluster(split=(1, 1)))


@pytest.mark.parametrize("name", ENGINES.names())
def test_compose_has_what_compose_needs(name: str) -> None:
    engine = find_engine(name)
    serving = replace(serving_for(engine), replicas=2)
    files = render("compose", engine, serving).files
    found = yaml.safe_load(files["compose.yaml"])
    assert set(found) - {"secrets"} == {"name", "services", "volumes"}
    assert len(found["services"]) == 2
    ports, devices = set(), []
    for service in found["services"].values():
        assert {"image", "command", "ports", "volumes", "healthcheck", "restart"} <= set(service)
        assert service["healthcheck"]["test"][0] == "CMD"
        assert all(isinstance(word, str) for word in service["command"])
        ports |= set(service["ports"])
        if serving.on_gpu:
            devices += service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    assert len(ports) == 2
    assert len(devices) == len(set(devices)) == (8 if serving.on_gpu else 0)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("name", ENGINES.names())
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    engine = find_engine(name)
    files = render("systemd", engine, replace(serving_for(engine), replicas=2)).files
    units = [tmp_path / each for each in files if each.endswith((".service", ".timer"))]
    assert len(units) == 6
    for unit in units:
        unit.write_text(files[unit.name], encoding="utf-8")
    assert _complaints(tmp_path, units) == []
    broken = units[0].read_text(encoding="utf-8").replace("Restart=on-failure", "Restart=perhaps")
    if broken != units[0].read_text(encoding="utf-8"):
        units[0].write_text(broken, encoding="utf-8")
        assert _complaints(tmp_path, units[:1]) != []


def _complaints(folder: Path, units: list[Path]) -> list[str]:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--generators=no", *units],
        capture_output=True, text=True, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}, check=False,
    )  # fmt: skip
    return [line for line in done.stderr.splitlines() if any(unit.name in line for unit in units)]


def test_command_keeps_json_in_one_word() -> None:
    script = render("command", find_engine("vllm"), H100).files["launch.sh"]
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert "exec vllm serve org/model-70b" in script


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        find_engine("vlm")
    with pytest.raises(UserError, match="unknown target"):
        render("helm", find_engine("vllm"), H100)
    with pytest.raises(UserError, match="unknown autoscaler"):
        render("kubernetes", find_engine("vllm"), H100, Cluster(scaler="magic"))
    assert "kubernetes" in TARGETS


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_probe_tells_a_hang_from_work_and_from_rest(tmp_path: Path) -> None:
    """The script itself, against a server that plays the engine's metrics."""
    shown = {"running": 0, "tokens": 10}

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            label = '{model_name="m"}'
            body = f"vllm:num_requests_running{label} {shown['running']}.0\n"
            body += f"vllm:iteration_tokens_total_sum{label} {shown['tokens']}\n"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = progress_script(find_engine("vllm")).replace(":8000/", f":{server.server_port}/")

    def look(running: int, tokens: int) -> bool:
        shown.update(running=running, tokens=tokens)
        call = ["sh", "-c", script, "probe", str(tmp_path / "memory")]
        return subprocess.run(call, check=False, env={**os.environ, "no_proxy": "*"}).returncode == 0

    assert look(0, 10)
    assert look(0, 10)  # at rest nothing needs to move
    assert look(2, 25)
    assert not look(2, 25)  # work, but no token
    assert look(2, 26)
    server.shutdown()
    server.server_close()
    assert not look(0, 26)  # nobody answers
