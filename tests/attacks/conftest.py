"""One server for most of the suite: a tiny chat model and a key for each tenant.

`TOKENMILL_TREE=/path/to/tree` starts the server of another source tree, to see which attacks that one does not stand.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.attack_client import Target
from benchmarks.tenant_keys import key_of, write_keys
from tests.e2e.serving import RunningServer

if os.environ.get("TOKENMILL_TREE"):
    sys.path.insert(0, os.environ["TOKENMILL_TREE"])  # for the few tests that call the package itself

TENANTS = ("good", "evil", "other", "vip")
_LIMITS = {
    "evil": {"max_sequences": 64, "max_queue_share": 0.5, "max_pinned_share": 0.2},
    "other": {"metrics": True},
    "vip": {"max_priority": -100},
}
FLAGS = ("--context", "256", "--concurrency", "8", "--max-queued-requests", "64", "--memory", "48MiB")
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def chat_model(model: Path, folder: Path, template: str = _TEMPLATE) -> Path:
    """A copy of a checkpoint with a chat template of its own."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class AttackedServer(RunningServer):
    """With keys. What the suite asks of it in its own name, it asks as the tenant `other`."""

    def __init__(self, model: Path, keys: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        write_keys(keys, TENANTS, _LIMITS)
        super().__init__(model, *FLAGS, "--api-keys-file", str(keys), *flags, env=env)
        self.http.headers["Authorization"] = f"Bearer {key_of('other')}"
        self.model = model

    def target(self, tenant: str | None = "evil") -> Target:
        return Target(self.url, key_of(tenant) if tenant else None)

    @property
    def engine(self) -> int:
        return int(self.load()["engine_pid"] or 0)


@pytest.fixture(scope="session")
def tiny_chat(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(model_path("stories15m"), tmp_path_factory.mktemp("attacked") / "model")


@pytest.fixture(scope="session")
def _running(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[AttackedServer]]:
    """The server in a list: `served` replaces one that an attack has ended."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    servers = [AttackedServer(tiny_chat, keys)]
    try:
        yield servers
    finally:
        servers[0].stop()


@pytest.fixture
def served(_running: list[AttackedServer], tiny_chat: Path, tmp_path: Path) -> Iterator[AttackedServer]:
    """Ready, and the same engine afterwards: no attack may cost it its life."""
    if not _well(_running[0]):
        _running[0].stop()
        _running[0] = AttackedServer(tiny_chat, tmp_path / "keys.json")
    server = _running[0]
    engine = server.engine
    yield server
    assert server.process.poll() is None, "the server is gone:\n" + server.log[-2000:]
    assert server.engine == engine, "the engine was replaced:\n" + server.log[-2000:]


def _well(server: RunningServer) -> bool:
    if server.process.poll() is not None:
        return False
    try:
        return server.http.get("/health", timeout=10).status_code == 200
    except Exception:
        server.process.send_signal(signal.SIGKILL)
        return False
