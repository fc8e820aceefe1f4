"""`bench serve`: sends a dataset to an OpenAI-compatible server, open or closed loop, and reports what came back.

An open loop sends on schedule whatever the server does, and latency is also counted from the intended time, so that a
stalled server cannot hide its queue. A closed loop keeps a number of requests in flight. Called by the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tokenmill.bench.lora_mix import assign, parse_mix
from tokenmill.bench.serve_arrivals import arrival_offsets
from tokenmill.bench.serve_client import Sample, StreamClient
from tokenmill.bench.serve_datasets import load_items
from tokenmill.bench.serve_item import Item
from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError

OnDone = Callable[[Sample], None]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything a report needs. Samples are in the order of the dataset."""

    job: ServeJob
    model: str
    samples: list[Sample]
    began: float
    ended: float
    open_loop: bool
    client_cpu: float  # seconds of CPU that the load generator used


def measure_serving(job: ServeJob, on_done: OnDone | None = None) -> Measurement:
    """Run the job. `on_done` is called as each request ends."""
    headers = _headers(job)
    model = job.model or _first_model(job, headers)
    items = load_items(job)
    offsets = arrival_offsets(job, items)
    names = assign(parse_mix(job.lora_mix), len(items))
    bodies = [request_body(job, item, name or model) for item, name in zip(items, names, strict=True)]
    client = StreamClient(job.base_url, job.path, headers, job.request_timeout, job.save_detailed)
    return run_loop(_measure(job, model, client, items, bodies, offsets, on_done or (lambda _: None)))


def run_loop(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work` on the fastest event loop there is: measuring must cost little."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def request_body(job: ServeJob, item: Item, model: str) -> bytes:
    """One request. `max_tokens` is the name of the limit that servers of both backends know."""
    body: dict[str, Any] = {"model": model}
    if job.is_chat:
        body |= {"messages": [{"role": "user", "content": item.prompt}], "max_tokens": item.output_len}
    else:
        body |= {"prompt": item.prompt, "max_tokens": item.output_len}
    body |= {"temperature": job.temperature, "stream": True, "stream_options": {"include_usage": True}}
    if job.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body | job.extra()).encode()


async def _measure(
    job: ServeJob,
    model: str,
    client: StreamClient,
    items: list[Item],
    bodies: list[bytes],
    offsets: list[float] | None,
    on_done: OnDone,
) -> Measurement:
    await _warm_up(job, client, items, model)
    cpu = time.process_time()
    began = time.perf_counter()
    work = list(zip(bodies, items, strict=True))
    if offsets is None:
        samples = await _closed_loop(client, work, job.max_concurrency or len(work), on_done)
    else:
        samples = await _open_loop(client, work, offsets, job.max_concurrency or len(work), began, on_done)
    ended = max(sample.ended for sample in samples)
    cpu = time.process_time() - cpu
    client.close()
    return Measurement(job, model, samples, began, ended, offsets is not None, cpu)


async def _closed_loop(
    client: StreamClient, work: list[tuple[bytes, Item]], concurrency: int, on_done: OnDone
) -> list[Sample]:
    samples: list[Sample | None] = [None] * len(work)
    waiting: Iterator[tuple[int, tuple[bytes, Item]]] = iter(enumerate(work))

    async def one_slot() -> None:
        for number, (body, item) in waiting:  # one iterator shared by all slots
            samples[number] = sample = await client.send(body, item.prompt_len)
            on_done(sample)

    await asyncio.gather(*(one_slot() for _ in range(min(concurrency, len(work)))))
    return [sample for sample in samples if sample is not None]


async def _open_loop(
    client: StreamClient,
    work: list[tuple[bytes, Item]],
    offsets: list[float],
    concurrency: int,
    began: float,
    on_done: OnDone,
) -> list[Sample]:
    slots = asyncio.Semaphore(concurrency)

    async def one(body: bytes, item: Item, intended: float) -> Sample:
        async with slots:
            sample = await client.send(body, item.prompt_len, intended)
        on_done(sample)
        return sample

    tasks = []
    for (body, item), offset in zip(work, offsets, strict=True):
        while (delay := began + offset - time.perf_counter()) > 0:  # timers of libuv may fire some milliseconds early
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(body, item, began + offset)))
    return list(await asyncio.gather(*tasks))


async def _warm_up(job: ServeJob, client: StreamClient, items: list[Item], model: str) -> None:
    """Warm up with the first prompt reversed: the same length, but its prefixes are not in the cache afterwards."""
    for _ in range(job.num_warmups):
        item = items[0]
        body = request_body(job, Item(item.prompt[::-1], item.prompt_len, min(item.output_len, 16)), model)
        sample = await client.send(body, item.prompt_len)
        if not sample.ok:
            raise UserError(f"the warm-up request failed: {sample.error}", "check the server and the flags")


def _headers(job: ServeJob) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY", "")
    return ({"authorization": f"Bearer {key}"} if key else {}) | job.headers()


def _first_model(job: ServeJob, headers: dict[str, str]) -> str:
    url = job.base_url.rstrip("/") + "/v1/models"
    try:
        answer = httpx.get(url, headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"cannot reach {url}: {error}", "check --base-url, or give --model") from None
    if answer.status_code == 401:
        raise UserError(f"{url} requires an API key", "set OPENAI_API_KEY")
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        name = answer.json()["data"][0]["id"]
        if isinstance(name, str):
            return name
    raise UserError(f"{url} lists no model (status {answer.status_code})", "give --model")
