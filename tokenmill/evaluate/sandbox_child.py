"""The two children of sandbox.py: the candidate runs the program that a model wrote, the checker runs the tests.

A script, not a module: standard library only. The checker calls the candidate's function through pipes. Arguments and
results are plain data in JSON: no object, class or patched builtin of the candidate reaches the process that decides.
Both confine themselves (confinement.py) before they run anything.
"""

import builtins
import importlib.util
import json
import os
import sys
from typing import Any, BinaryIO

_MAX_MESSAGE = 16 << 20  # bytes of one call or result
_SMALL = 1 << 60  # integers above it are written in hexadecimal


class NotPlain(Exception):
    """A value that cannot cross between the processes."""


class CandidateEnded(BaseException):
    """Not an Exception: a test's `except Exception` must not hide it."""


def encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int):
        number = int(value)
        return number if -_SMALL < number < _SMALL else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(each) for each in value]
    for name, types in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, types):
            return {name: [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(each)] for key, each in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    raise NotPlain(f"{kind.__name__} is not plain data")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    (name, content), *others = value.items()
    if others:
        raise NotPlain("a message is not as it should be")
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float.fromhex(content)
    if name == "complex":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(key): decode(each) for key, each in content}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[name](decode(each) for each in content)


def send(stream: BinaryIO, message: Any) -> None:
    data = json.dumps(message).encode()
    if len(data) > _MAX_MESSAGE:
        raise NotPlain("a call or a result is too large")
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    head = stream.read(4)
    size = int.from_bytes(head, "little")
    if len(head) < 4 or size > _MAX_MESSAGE:
        raise EOFError
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return json.loads(data)


# --- the candidate ---


def run_candidate(order: dict[str, Any], calls: BinaryIO, results: BinaryIO) -> None:
    """Define the function, then answer calls until there are no more."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    try:
        exec(compile(order["program"], "program", "exec"), space)
        function = space[order["entry_point"]]
    except BaseException as error:
        send(results, {"defined": _described(error)})
        return
    send(results, {"defined": None})
    while True:
        try:
            positional, named = receive(calls)
        except EOFError:
            return
        try:
            value = function(*decode(positional), **{name: decode(each) for name, each in named.items()})
            answer = {"value": encode(value)}
        except BaseException as error:
            answer = {"error": _described(error)}
        send(results, answer)


def _described(error: BaseException) -> list[str]:
    try:
        return [type(error).__name__, str(error)[:400]]
    except BaseException:  # its __str__ is the candidate's
        return [type(error).__name__, ""]


# --- the checker ---


class Candidate:
    """The function in the other process."""

    def __init__(self, calls: BinaryIO, results: BinaryIO) -> None:
        self._calls = calls
        self._results = results

    def ready(self) -> None:
        answer = self._receive()
        if answer.get("defined") is not None:
            self._fail(answer["defined"])

    def __call__(self, *positional: Any, **named: Any) -> Any:
        try:
            call = [[encode(each) for each in positional], {name: encode(each) for name, each in named.items()}]
        except NotPlain as error:
            raise CandidateEnded(f"not measurable: an argument of the tests, {error}") from None
        try:
            send(self._calls, call)
        except OSError:
            raise CandidateEnded("ended early") from None
        answer = self._receive()
        if "value" in answer:
            return decode(answer["value"])
        return self._fail(answer.get("error"))

    def _receive(self) -> dict[str, Any]:
        try:
            answer = receive(self._results)
        except (EOFError, ValueError, RecursionError):
            raise CandidateEnded("ended early") from None
        if not isinstance(answer, dict):
            raise CandidateEnded("ended early")
        return answer

    def _fail(self, described: Any) -> Any:
        """The same exception by name, if it is one of Python's; never one that only ends a process."""
        name, text = (str(each) for each in described)
        if name == "SystemExit":
            raise CandidateEnded("ended early")
        kind = getattr(builtins, name, None)
        if name == "NotPlain":
            raise CandidateEnded(f"the result {text}")
        if isinstance(kind, type) and issubclass(kind, Exception) and name not in _WITH_FIELDS:
            raise kind(text)
        raise CandidateEnded(f"{name}: {text}")


_WITH_FIELDS = ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError", "ExceptionGroup")


def run_checker(order: dict[str, Any], calls: BinaryIO, results: BinaryIO) -> str:
    """The verdict in words. The tests see the prompt's own helpers, and the candidate in place of its function."""
    space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    try:
        exec(compile(order["setup"], "setup", "exec"), space)
        candidate = Candidate(calls, results)
        candidate.ready()
        space[order["entry_point"]] = candidate
        exec(compile(order["tests"], "tests", "exec"), space)
        space["check"](candidate)
    except CandidateEnded as error:
        return str(error)
    except BaseException as error:
        return ": ".join(_described(error))[:400]
    return "passed"


def _confinement() -> Any:
    """By its file: the folder of this script must not be on the path, where its names would hide the library's."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "confinement.py")
    spec = importlib.util.spec_from_file_location("confinement", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    role, in_number, out_number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    order = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    failed = _confinement().confine(order["folder"], order["seconds"], order["memory_bytes"], order["file_bytes"])
    if failed and not order["unsafe"]:
        os.write(answer, json.dumps({"missing": failed}).encode())
        os._exit(3)
    incoming, outgoing = os.fdopen(in_number, "rb"), os.fdopen(out_number, "wb")
    if role == "candidate":
        os.close(answer)  # what it says about itself is not asked for
        run_candidate(order, incoming, outgoing)
    else:
        os.write(answer, json.dumps({"why": run_checker(order, outgoing, incoming)}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
