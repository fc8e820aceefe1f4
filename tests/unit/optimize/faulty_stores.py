"""KV dtypes that do not work, each in its own way: registered by tests, imported by the children that try them."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from tokenmill.model.kvstore.dense import Float32Store

_PIECE = 32 << 20
_MOST = 3 << 30


class CrashingStore(Float32Store):
    def __init__(self, *_arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class HangingStore(Float32Store):
    def __init__(self, *_arguments: Any) -> None:
        threading.Event().wait()


class HungryStore(Float32Store):
    def __init__(self, *_arguments: Any) -> None:
        held, pause = [], threading.Event()
        while len(held) * _PIECE < _MOST:
            held.append(bytearray(os.urandom(1)) * _PIECE)
            pause.wait(0.01)
        raise AssertionError("nobody stopped it")


class RefusingStore(Float32Store):
    def __init__(self, *_arguments: Any) -> None:
        raise RuntimeError("no pages of this kind")
