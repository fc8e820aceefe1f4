"""Records cross the pipe and the store unchanged, and a child has what is registered in its parent."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tokenmill.bench.prompts import SyntheticRequest
from tokenmill.config import EngineConfig
from tokenmill.model.kvstore import KV_STORES
from tokenmill.optimize.contender_messages import (
    Failure,
    Judge,
    RunRequests,
    begin,
    decode_answer,
    decode_command,
    encode_answer,
    encode_begin,
    encode_command,
)
from tokenmill.optimize.quality import QualityPlan
from tokenmill.optimize.records import from_plain, to_plain
from tokenmill.optimize.results import Check, Proof, Quality, Run, TaskScore
from tokenmill.quantize.schemes import METHODS

_QUALITY = Quality(0.1, 0.0, 0.2, 0.01, 0.02, 0.9, 12.0, 11.0, 100, 0, 0.05)


def test_nested_records_come_back_as_they_were() -> None:
    task = TaskScore("task", 10, 0.5, 0.6, -0.2, 0.1, 1.0)
    proof = Proof(_QUALITY, (task,), (Check("repetition", 0.1, 0.1, 0.2),), ("too much",))
    assert from_plain(Proof, json.loads(json.dumps(to_plain(proof)))) == proof
    assert from_plain(Proof, to_plain(Proof(None))) == Proof(None)


def test_commands_and_answers_are_one_line_each() -> None:
    config = EngineConfig(context=20).fill("of the test", batch_tokens=64)
    plan = QualityPlan("text\nof two lines", 64, 1, 2, 0.5, None, tasks=(Path("a.jsonl"),))
    command = Judge(plan, Path("base"), config, Path("model"), EngineConfig(), True)
    line = encode_command(command, 5.0)
    assert line.count(b"\n") == 1
    decoded, seconds = decode_command(line)
    assert (decoded, seconds) == (command, 5.0)
    assert decoded.reference_config.source("batch_tokens") == "automatic: of the test"
    requests = RunRequests([SyntheticRequest([1, 2], 3)])
    assert decode_command(encode_command(requests, math.inf)) == (requests, math.inf)
    run = Run(1.0, 2.0, 3.0, math.nan, 4.0)
    answer = decode_answer(encode_answer(run), Run)
    assert isinstance(answer, Run)
    assert math.isnan(answer.ttft_ms)
    assert decode_answer(encode_answer(Failure("no", "user")), Run) == Failure("no", "user")


def test_a_child_knows_what_its_parent_registered() -> None:
    KV_STORES.register("toy", "somewhere:Toy")
    METHODS["toy"] = METHODS["rtn"]
    try:
        line = encode_begin()
    finally:
        KV_STORES.unregister("toy")
        method = METHODS.pop("toy")
    try:
        begin(line)
        assert KV_STORES.entries()["toy"] == "somewhere:Toy"
        assert METHODS["toy"] == method
    finally:
        KV_STORES.unregister("toy")
        METHODS.pop("toy", None)
