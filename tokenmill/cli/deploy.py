"""`tokenmill deploy`: a plan -> launch line, Kubernetes manifests, compose file or systemd units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.options import AsJson, Verbose
from tokenmill.cli.output import emit
from tokenmill.cli.screens.deploy import deploy_screen
from tokenmill.config import parse_count
from tokenmill.errors import UserError

_Tokens = Annotated[int, typer.Option(parser=parse_count, metavar="TOKENS")]


def deploy(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="What the engine loads: Hugging Face id, directory or file.")
    ],
    engine: Annotated[
        str, typer.Option(help="tokenmill, vllm, sglang, trtllm, llamacpp or ollama. Default: the plan's.")
    ] = "",
    target: Annotated[str, typer.Option(help="command, kubernetes, compose or systemd.")] = "command",
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Answer of `tokenmill plan --json`.")] = None,
    planned_as: Annotated[str, typer.Option(help="Name or config.json to plan with, where MODEL is neither.")] = "",
    gpu: Annotated[list[str] | None, typer.Option(metavar="NAME[xN]", help="Devices; repeatable.")] = None,
    use: Annotated[str, typer.Option(help="Workload preset: chat, agent, rag, summarize, code, batch.")] = "chat",
    input_len: _Tokens = 0,
    output_len: _Tokens = 0,
    concurrency: Annotated[int, typer.Option(help="Concurrent users.")] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second, instead of --concurrency.")] = 0.0,
    ttft: Annotated[float, typer.Option(help="Promise: time to first token, ms; 0: none.")] = -1.0,
    itl: Annotated[float, typer.Option(help="Promise: time between tokens, ms; 0: none.")] = -1.0,
    weights: Annotated[str, typer.Option(help="Fix the weight format.")] = "",
    kv_cache_dtype: Annotated[str, typer.Option(help="Fix the KV dtype (bf16, fp8, int8, int4).")] = "",
    tp: Annotated[int, typer.Option(help="Fix the tensor-parallel size.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the objects and in the API. Default: from MODEL.")] = "",
    split: Annotated[str, typer.Option(metavar="P:D", help="Prefill and decode in pools of P and D replicas.")] = "",
    router: Annotated[bool, typer.Option("--router", help="Kubernetes: our router in front of one pool.")] = False,
    nodes: Annotated[int, typer.Option(help="Kubernetes: nodes that a replica spans (LeaderWorkerSet).")] = 1,
    gateway: Annotated[
        str, typer.Option(metavar="NAME", help="Kubernetes: Gateway that leads to an InferencePool of the pods.")
    ] = "",
    autoscaler: Annotated[str, typer.Option(help="Kubernetes: keda, hpa or none.")] = "keda",
    max_replicas: Annotated[int, typer.Option(help="Kubernetes: maximum replicas. 0: twice the plan's.")] = 0,
    prometheus: Annotated[str, typer.Option(help="Prometheus address that KEDA queries.")] = "",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the files here instead of printing.")] = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
) -> None:
    """Write what deploys MODEL: flags valid today, probes that see progress, scaling on queue and KV use."""
    from tokenmill.deploy.autoscaling import PROMETHEUS
    from tokenmill.deploy.cluster import Cluster
    from tokenmill.deploy.render import find_engine, render
    from tokenmill.deploy.serving import from_plan
    from tokenmill.deploy.split import parse_split
    from tokenmill.hardware.catalog import load_catalog

    catalog = load_catalog()
    chosen = find_engine(engine) if engine else None
    if plan is not None:
        planned = _read(plan)
    else:
        given = {"input_tokens": input_len, "output_tokens": output_len, "concurrency": concurrency, "rate": rate}
        promises = {key: value for key, value in (("ttft_ms", ttft), ("itl_ms", itl)) if value >= 0}
        fixed = {"weights": weights, "kv": kv_cache_dtype, "tp": tp or (chosen.max_tp if chosen else 0)}
        fixed["engine"] = chosen.planner_name if chosen else ""
        loads = {key: value for key, value in given.items() if value}
        planned = _plan(planned_as or model, gpu or [], use, loads | promises, fixed)
    serving = from_plan(planned, catalog, model, name)
    found = render(
        target,
        chosen or find_engine(planned["plan"]["engine"]),
        serving,
        Cluster(
            parse_split(split) if split else None,
            router,
            nodes,
            gateway,
            autoscaler,
            prometheus or PROMETHEUS,
            max_replicas,
        ),
    )
    result: dict[str, Any] = {
        "command": list(found.command),
        "prepare": list(found.prepare),
        "notes": list(found.notes),
    }
    if out is not None:
        _write(out, found.files)
        result["written"] = [str(out / each) for each in found.files]
    else:
        result["files"] = found.files
        if not as_json:
            _print(found.files, found.notes)
            return
    emit(result, as_json, lambda: deploy_screen(result, target))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "write it with `tokenmill plan ... --json`") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "write it with `tokenmill plan ... --json`") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not the answer of a plan", "write it with `tokenmill plan ... --json`")
    return found


def _plan(model: str, gpus: list[str], use: str, given: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    from tokenmill.hardware.catalog import load_catalog
    from tokenmill.plan.question.model_names import describe_for_planning
    from tokenmill.plan.question.pricing import Pricing
    from tokenmill.plan.question.question import Limits, Question
    from tokenmill.plan.question.workload import preset
    from tokenmill.plan.search.answer import answer

    if not gpus:
        raise UserError("there is neither a plan nor hardware", "give --plan FILE or --gpu h100x2")
    catalog = load_catalog()
    groups = [catalog.parse_gpu(each) for each in gpus]
    question = Question(
        describe_for_planning(model), groups, preset(use, **given), Pricing(), Limits(), fixed_fleet=True, **fixed
    )
    return answer(question, catalog)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}", "give another --out") from None
        if path.suffix == ".sh":
            path.chmod(0o755)


def _print(files: dict[str, str], notes: tuple[str, ...]) -> None:
    """The files themselves, so that they can be piped on; everything else is a comment."""
    for name, text in files.items():
        if len(files) > 1:
            print(f"# ---- {name}")
        print(text, end="")
    for note in notes:
        print(f"# note: {note}")
