"""Server options: flags over file over defaults, aliases, bad values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import UserError
from tokenmill.serve.config import KEY_VARIABLE, ServeConfig, read_config_file, split_options


def test_flags_beat_the_file_and_aliases_mean_the_same_option(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nmax-num-seqs: 8\nmax-num-queued-reqs: 5\ncontext: 2k\napi-key: [a, b]\n")
    given = {"concurrency": 4, "host": "0.0.0.0"}
    server, engine = split_options(given, read_config_file(str(file)), "serve.yaml")
    assert (server.port, server.host, server.max_queued_requests, server.api_key) == (9000, "0.0.0.0", 5, ("a", "b"))
    assert (engine.concurrency, engine.context, engine.scheduling, engine.speculate) == (4, 2048, "fair", "auto")
    assert engine.source("concurrency") == "set by you"
    assert engine.source("context") == "from file serve.yaml"
    assert engine.source("scheduling") == "default"


def test_the_environment_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PORT", "9001"), ("SCHEDULING", "priority"), ("CONTEXT", "1k"), ("MAX_N", "3")):
        monkeypatch.setenv(f"TOKENMILL_{name}", value)
    server, engine = split_options({"context": 512}, {"max-n": 4}, "serve.yaml")
    assert (server.port, server.max_n) == (9001, 4)
    assert (engine.context, engine.scheduling) == (512, "priority")
    assert engine.source("scheduling") == "from environment variable TOKENMILL_SCHEDULING"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 70000}, "port is 70000"),
        ({"port": "eight"}, "port must be a int"),
        ({"max_num_seqs": 1, "concurrency": 2}, "given twice"),
        ({"max_n": 0}, "max_n is 0"),
        ({"api_key": [""]}, "api_key must be non-empty strings"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_options(options)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "1: 2\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError):
        read_config_file(str(tmp_path / "c.yaml"))
    with pytest.raises(UserError, match="cannot read"):
        read_config_file(str(tmp_path / "missing.yaml"))


def test_sizes_and_seconds_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = split_options({"max_body_bytes": "1MiB", "stall_timeout": 5, "max_queued_tokens": "8k"})
    assert (server.max_body_bytes, server.stall_timeout, server.max_queued_tokens) == (1 << 20, 5.0, 8192)
    monkeypatch.setenv(KEY_VARIABLE, "from-env")
    assert ServeConfig(api_key=("flag",)).all_keys() == ("flag", "from-env")
