"""Fleets on Kubernetes: pools behind our router, ranks, groups over nodes, gateways, and what binds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError

from tests.unit.deploy.schemas import check
from tests.unit.deploy.test_engines import CPU, H100, H200, flags
from tokenmill.config import EngineConfig, option_fields
from tokenmill.deploy.cluster import Cluster
from tokenmill.deploy.render import find_engine, render
from tokenmill.deploy.serving import Serving
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig, split_options

SHAPES = {
    "one pool": Cluster(),
    "hpa": Cluster(scaler="hpa"),
    "routed": Cluster(router=True),
    "split": Cluster(split=(1, 2)),
    "gateway": Cluster(gateway="front"),
    "routed, gateway": Cluster(router=True, gateway="front"),
}
RANKS = replace(CPU, tp=2, pp=2)
Objects = dict[tuple[str, str], dict[str, Any]]


def built(files: dict[str, str]) -> Objects:
    """What `kubectl apply -k` would make of them: resources of the kustomization, no object twice."""
    kustomization = yaml.safe_load(files["kustomization.yaml"])
    check(kustomization)
    found: Objects = {}
    for name in kustomization["resources"]:
        for each in yaml.safe_load_all(files[name]):
            key = (check(each), each["metadata"]["name"])
            assert key not in found
            found[key] = each
    assert {name for name in files if name.endswith(".yaml")} == {"kustomization.yaml", *kustomization["resources"]}
    images = {f"{each['name']}:{each['newTag']}" for each in kustomization["images"]}
    assert images == {each["image"] for one in found.values() for each in containers(one)}
    return found


def containers(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, dict):
        return []
    return [*part.get("containers", ()), *(each for value in part.values() for each in containers(value))]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = found
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("serving", [CPU, H200, RANKS], ids=["cpu", "gpu", "ranks"])
def test_the_base_builds_and_is_valid(shape: str, serving: Serving) -> None:
    found = built(render("kubernetes", find_engine("tokenmill"), serving, SHAPES[shape]).files)
    for (kind, name), each in found.items():
        if kind in ("Deployment", "StatefulSet"):
            assert ("PodDisruptionBudget", name) in found
            assert ("ServiceMonitor", name) in found
            assert container(each)["lifecycle"]["preStop"]
            assert each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 90
        if kind in ("ScaledObject", "HorizontalPodAutoscaler"):
            target = each["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in found
        if kind == "InferencePool":
            selected = each["spec"]["selector"]["matchLabels"].items()
            pods = [
                one["spec"]["template"] for (kind, _), one in found.items() if kind in ("Deployment", "StatefulSet")
            ]
            assert any(selected <= pod["metadata"]["labels"].items() for pod in pods)


def test_our_router_knows_every_replica_that_may_be() -> None:
    found = built(render("kubernetes", find_engine("tokenmill"), H200, Cluster(router=True, max_replicas=3)).files)
    pool, router = found["StatefulSet", "model-8b-pool"], found["Deployment", "model-8b-router"]
    words = container(router)["args"]
    urls = [words[at + 1] for at, word in enumerate(words) if word == "--replica"]
    assert urls == [f"http://model-8b-pool-{each}.model-8b-pool:8000" for each in range(3)]
    assert found["Service", "model-8b-pool"]["spec"]["clusterIP"] == "None"
    assert pool["spec"]["serviceName"] == "model-8b-pool"
    assert router["spec"]["replicas"] == 2
    assert container(router)["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert "nvidia.com/gpu" not in container(router)["resources"]["limits"]
    assert "tolerations" not in router["spec"]["template"]["spec"]
    assert found["ScaledObject", "model-8b"]["spec"]["maxReplicaCount"] == 3
    keys = {
        each["name"]: each["valueFrom"]["secretKeyRef"]["key"]
        for each in container(router)["env"]
        if "KEY" in each["name"]
    }
    assert keys == {"TOKENMILL_REPLICA_KEY": "peer", "TOKENMILL_ADMIN_KEY": "metrics"}


def test_who_decodes_knows_where_prompts_are_computed() -> None:
    found = built(render("kubernetes", find_engine("tokenmill"), H200, Cluster(split=(2, 1))).files)
    prefill, decode = (container(found["StatefulSet", f"model-8b-{role}"])["args"] for role in ("prefill", "decode"))
    assert prefill[prefill.index("--role") + 1] == "prefill"
    assert prefill[prefill.index("--kv-listen") + 1] == "$(POD_IP):7800"
    hosts = [f"model-8b-prefill-{each}.model-8b-prefill" for each in range(2)]
    assert [decode[at + 1] for at, word in enumerate(decode) if word == "--kv-peer"] == [
        f"{host}:7800" for host in hosts
    ]
    urls = [decode[at + 1] for at, word in enumerate(decode) if word == "--prefill-url"]
    assert urls == [f"http://{host}:8000" for host in hosts]
    words = container(found["Deployment", "model-8b-router"])["args"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "--replica"] == [
        "http://model-8b-decode-0.model-8b-decode:8000"
    ]


def test_ranks_are_processes_of_one_pod() -> None:
    found = built(render("kubernetes", find_engine("tokenmill"), RANKS).files)
    pod = container(found["Deployment", "model-1b"])
    told = flags(tuple(pod["args"]))
    assert (told["--tensor-parallel-size"], told["--pipeline-parallel-size"]) == ("2", "2")
    memory = found["Deployment", "model-1b"]["spec"]["template"]["spec"]["volumes"][1]["emptyDir"]
    assert memory == {"medium": "Memory", "sizeLimit": "8Gi"}


@pytest.mark.parametrize("role", ["", "prefill", "decode"])
def test_our_lines_are_ones_that_we_accept(role: str) -> None:
    engine = find_engine("tokenmill")
    launch = engine.launch(RANKS, role)
    words = launch.command + (engine.peers(("a.b",)) if role == "decode" else ())
    told = {name[2:]: value for name, value in flags(words).items()}
    known = {each.name for each in (*option_fields(ServeConfig), *option_fields(EngineConfig))}
    wanted = {"tensor_parallel_size", "pipeline_parallel_size", *({"role"} if role else ())}
    if not wanted <= known:
        pytest.skip(f"this build has no {', '.join(sorted(wanted - known))}")
    _, options = split_options(
        {name: [value] if name in ("kv-peer", "prefill-url") else value for name, value in told.items()}
    )
    assert options.device == "cpu"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_replicas_over_nodes_are_groups(name: str) -> None:
    found = built(render("kubernetes", find_engine(name), H100, Cluster(nodes=2)).files)
    group = found["LeaderWorkerSet", "model-70b"]["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (2, 2)
    for role in ("leaderTemplate", "workerTemplate"):
        (pod,) = group["leaderWorkerTemplate"][role]["spec"]["containers"]
        assert pod["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert pod["args"][pod["args"].index("--nnodes") + 1] == "2"
        assert ("readinessProbe" in pod) == (role == "leaderTemplate")
    leader = group["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    worker = group["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
    selector = found["Service", "model-70b"]["spec"]["selector"].items()
    assert selector <= leader.items()
    assert not selector <= worker.items()
    assert found["ScaledObject", "model-70b"]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_the_schemas_can_fail() -> None:
    files = render("kubernetes", find_engine("tokenmill"), H200, Cluster(gateway="front")).files
    pool, route = yaml.safe_load_all(files["gateway.yaml"])
    pool["spec"]["targetPorts"] = [{"number": 0}]
    route["spec"]["rules"][0]["timeouts"]["request"] = "for ever"
    (group,) = [
        each
        for each in yaml.safe_load_all(
            render("kubernetes", find_engine("sglang"), H100, Cluster(nodes=2)).files["serving.yaml"]
        )
        if each["kind"] == "LeaderWorkerSet"
    ]
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["container"] = []
    for wrong in (pool, route):
        with pytest.raises(ValidationError):
            check(wrong)
    with pytest.raises(Exception, match="container"):
        check(group)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match="given together"):
        Cluster(router=True, split=(1, 1))
    with pytest.raises(UserError, match="drop one"):
        Cluster(split=(1, 1), gateway="front")
    with pytest.raises(UserError, match="share one node"):
        render("kubernetes", find_engine("tokenmill"), RANKS, Cluster(nodes=2))
    with pytest.raises(UserError, match="do not divide"):
        render("kubernetes", find_engine("vllm"), H100, Cluster(nodes=3))
    with pytest.raises(UserError, match="no router for one pool"):
        render("kubernetes", find_engine("vllm"), H100, Cluster(router=True))
    with pytest.raises(UserError, match="do not know the metrics"):
        render("kubernetes", find_engine("ollama"), CPU, Cluster(gateway="front"))
    with pytest.raises(UserError, match="need a cluster"):
        render("compose", find_engine("tokenmill"), CPU, Cluster(router=True))
