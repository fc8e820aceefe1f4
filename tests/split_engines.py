"""Two engines that compute nothing but prove everything, and a line between them that can be cut at any byte.

Each engine is the real scheduler, KV manager, staging memory, page server and peer tier over a ShadowRunner, whose rows
check that every slot they see holds exactly their own prefix. The line is a TCP proxy that a test tells what to do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from tests.fuzz.shadow_runner import ShadowRunner
from tests.fuzz.test_scheduler_properties import LAYERS
from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.kv.transfer.page_server import PageServer
from tokenmill.engine.kv.transfer.peer import PeerPages
from tokenmill.engine.kv.transfer.publisher import Publisher
from tokenmill.engine.kv.transfer.staging import Staging
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore.transfer import PagesOnHost
from tokenmill.types import Request

SECRET, IDENTITY = b"s" * 32, b"i" * 16
PAGE_BYTES = 1024
CONTEXT = 120
_FRAME = struct.Struct("<BxxxI")


class ShadowPages:
    """The runner's memory as a KV store: pages out, pages in."""

    def __init__(self) -> None:
        self.runner: ShadowRunner | None = None

    def export_pages(self, pages: Sequence[int]) -> PagesOnHost:
        assert self.runner is not None
        memory = self.runner.memory
        assert all(None not in memory[page] for page in pages), "a page that is not full leaves"
        return PagesOnHost(
            [memoryview(bytearray(json.dumps(memory[page]).encode().ljust(PAGE_BYTES))) for page in pages]
        )

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert self.runner is not None
        for page, content in zip(pages, data, strict=True):
            assert self.runner.kv._pool.refs[page] == 1, "a page that others use is overwritten"
            self.runner.memory[page] = json.loads(bytes(content))


class ShadowEngine:
    """`listens`: it computes prompts for others; `peer`: the address that it fetches from."""

    def __init__(
        self,
        layers: str = "full",
        listens: bool = False,
        peer: str = "",
        maps: bool = True,
        staging_pages: int = 200,
        clock: Callable[[], float] = time.monotonic,
        batch_tokens: int = 24,
        timeout: float = 30.0,
        identity: bytes = IDENTITY,
        num_pages: int = 0,
    ) -> None:
        layout = build_layout(LAYERS[layers], 4)
        store = ShadowPages()
        self.server: PageServer | None = None
        self.staging: Staging | None = None
        publisher = None
        if listens:
            self.staging = Staging(staging_pages * PAGE_BYTES, PAGE_BYTES, clock)
            self.server = PageServer("127.0.0.1:0", self.staging, SECRET, identity)
            publisher = Publisher(self.staging, store)
        self.peers = PeerPages([peer], SECRET, identity, PAGE_BYTES, timeout, maps) if peer else None
        self.stack = TierStack([], store, identity, PAGE_BYTES, self.peers)
        pages = num_pages or 4 * layout.peak_pages(CONTEXT)
        self.kv = KVManager(layout, pages, True, LeastRecentlyUsed(), self.stack, publisher=publisher)
        store.runner = ShadowRunner(self.kv)
        scheduler = Scheduler(self.kv, DISCIPLINES.get("fcfs")(), batch_tokens, 8, CONTEXT)
        self.core = EngineCore(scheduler, store.runner)
        self.outputs: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.core.add(request)

    def step(self) -> None:
        for event in self.core.step():
            self.outputs[event.request_id] += event.token_ids
        self.kv.check()

    def run(self, beside: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left; `beside` is called before each step."""
        while self.core.has_work:
            beside()
            self.step()

    def check(self) -> None:
        self.kv.check()
        if self.staging is not None:
            self.staging.check()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.kv.close(1.0)


class Line:
    """A TCP proxy. `on_frame(number, kind, data)` sees each frame that the server sends and returns what is passed on;
    None cuts the line. `cut_at`: byte of the server's stream after which both sides are closed; `flip_at`: byte that
    arrives changed. `on_request` sees the client's frames after its login in the same way."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_at: int | None = None
        self.flip_at: int | None = None
        self.on_frame: Callable[[int, int, bytes], bytes | None] = lambda _number, _kind, data: data
        self.on_request: Callable[[int, bytes], bytes | None] = lambda _kind, data: data
        self.num_bytes = 0  # that the server sent on the last connection
        self.num_frames = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self.num_bytes = self.num_frames = 0
            threading.Thread(target=self._pass_requests, args=(near, far), daemon=True).start()
            threading.Thread(target=self._pass_answers, args=(far, near), daemon=True).start()

    def _pass_requests(self, near: socket.socket, far: socket.socket) -> None:
        self._pass(near, far, lambda kind, data: self.on_request(kind, data))

    def _pass_answers(self, far: socket.socket, near: socket.socket) -> None:
        def answer(kind: int, data: bytes) -> bytes | None:
            changed = self.on_frame(self.num_frames, kind, data)
            self.num_frames += 1
            if changed is None:
                return None
            begin, self.num_bytes = self.num_bytes, self.num_bytes + len(changed)
            if self.flip_at is not None and begin <= self.flip_at < self.num_bytes:
                flipped = bytearray(changed)
                flipped[self.flip_at - begin] ^= 0x41
                changed = bytes(flipped)
            if self.cut_at is not None and self.cut_at < self.num_bytes:
                with contextlib.suppress(OSError):
                    near.sendall(changed[: max(0, self.cut_at - begin)])
                return None
            return changed

        self._pass(far, near, answer)

    def _pass(self, source: socket.socket, target: socket.socket, see: Callable[[int, bytes], bytes | None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                head = _read(source, _FRAME.size)
                kind, size = _FRAME.unpack(head)
                data = see(kind, head + _read(source, size))
                if data is None:
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
