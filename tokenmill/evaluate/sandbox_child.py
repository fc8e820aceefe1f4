"""The child of sandbox.py: restricts itself, then runs the program that it reads from standard input.

A script, not a module: it imports the standard library only, and nothing of tokenmill. Layers, each as far as the
system has it: resource limits, an unprivileged user, a name space without a network, and an audit hook that refuses
sockets, processes, signals, foreign functions and writing outside the folder.
"""

import builtins
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

_NOBODY = 65534
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_REFUSED = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.spawn",
    "os.posix_spawn",
    "os.kill",
    "os.chmod",
    "os.chown",
    "os.setxattr",
    "os.truncate",
    "pty.",
    "ctypes.",
    "signal.",
)
_PATHS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.utime")


class Refused(BaseException):
    """Not an Exception: the program's `except Exception` must not hide it."""


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    _leave_network()
    _limit(order)
    _drop_rights(order["folder"])
    sys.addaudithook(_guard(os.path.realpath(order["folder"])))
    why = _run(order["program"])
    os.write(answer, json.dumps({"word": order["word"], "why": why}).encode())
    os._exit(0)


def _run(program: str) -> str:
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except Refused as error:
        return f"refused: {error}"
    except SystemExit:
        return "ended early"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:400]
    return "passed"


def _limit(order: dict[str, Any]) -> None:
    seconds = max(1, int(order["seconds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"], order["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"], order["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file too large is an error of the write, not the end
    signal.setitimer(signal.ITIMER_REAL, 2 * order["seconds"])  # a program that sleeps uses no processor time


def _leave_network() -> None:
    """A name space of our own has no network in it. Where that is not allowed, the audit hook refuses sockets."""
    import ctypes

    with contextlib.suppress(Exception):
        library = ctypes.CDLL(None)
        if library.unshare(_CLONE_NEWNET) != 0:
            library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    del sys.modules["ctypes"]


def _drop_rights(folder: str) -> None:
    """Root becomes nobody, if nobody can read Python: limits on processes do not bind root."""
    if os.geteuid() != 0:
        return
    with contextlib.suppress(OSError):
        os.chown(folder, _NOBODY, _NOBODY)
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        os.setegid(0)
        if readable:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)


def _guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    def inside(path: Any) -> bool:
        if isinstance(path, int):
            return True  # an open file
        full = os.path.realpath(os.fsdecode(path))
        return full == folder or full.startswith(folder + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if (writes or set(mode or "") & set("wax+")) and path is not None and not inside(path):
                raise Refused("writing outside the folder")
        elif event.startswith(_PATHS):
            if not all(inside(each) for each in arguments if isinstance(each, (str, bytes, os.PathLike))):
                raise Refused(event)
        elif event.startswith(_REFUSED):
            raise Refused(event)

    return hook


if __name__ == "__main__":
    main()
