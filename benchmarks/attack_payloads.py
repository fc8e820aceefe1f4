"""Bodies that harm servers, as data: grammars, schemas, JSON, messages and raw HTTP. Used by attack_shapes.py.

Each is small enough to be let in by a limit on bytes, and costs far more than its size where it is not bounded.
"""

from __future__ import annotations

import json
from typing import Any

STORY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def chained_terminals(count: int = 3500) -> str:
    """A Lark grammar whose terminals refer to each other in a chain: recursion as deep as the chain (S1)."""
    rules = [f'T{number}: "a" T{number + 1}' for number in range(count)]
    return "\n".join(["start: T0", *rules, f'T{count}: "b"'])


def newlines(count: int = 16_000) -> str:
    """A grammar of empty lines: quadratic for an expression that looks for the first rule (S2)."""
    return "\n" * count + 'start: "a"'


GRAMMARS: dict[str, str] = {
    "nested groups": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "wide alternatives": "start: " + " | ".join(f'"w{number}"' for number in range(20_000)),
    "mutual recursion": "\n".join(f'r{n}: r{(n + 1) % 500} r{(n + 7) % 500} | "a"' for n in range(500)) + "\nstart: r0",
    "repeats of repeats": 'start: (("a"{1,500}){1,500}){1,500}',
    "left recursion": 'start: start start | "a" | ',
    "not a grammar": "start: %%% \x00 \ufffd ::= |||",
    "GBNF chain": "\n".join(f"r{n} ::= r{n + 1}" for n in range(3000)) + '\nroot ::= r0\nr3000 ::= "x"',
    "GBNF brackets": "root ::= " + "[" * 5000,
    "import": "start: x\n%import common.WORD -> x\n%import python.file_input -> y",
    "terminal expression": "start: X\nX: /" + "(a|aa)+" * 200 + "b/",
}
EXPRESSIONS: dict[str, str] = {
    "repeats of repeats": "(((a{1,200}){1,200}){1,200}){1,200}",
    "exponential": "(x+x+)+y" * 50,
    "intersections": "(.*a.{50}){50}",
    "wide classes": "[\\u0000-\\U0010ffff]{5000}",
    "alternatives": "|".join(f"(.*{number}.*)" for number in range(2000)),
    "nested groups": "(" * 2000 + "a" + ")" * 2000,
    "look-behind": "(?<=a{1,1000})b",
    "not an expression": "((((((",
}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS: dict[str, Any] = {
    "nested": _nested(60),
    "wide enum": {"enum": [f"value number {number}" for number in range(30_000)]},
    "many properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(5000)}},
    "long minimum": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "long string": {"type": "string", "minLength": 10_000_000},
    "exponential references": {
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
        | {"d30": {"type": "object"}},
        "$ref": "#/$defs/d0",
    },
    "circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "elsewhere": {"$ref": "file:///etc/passwd"},
    "hostile pattern": {"type": "string", "pattern": "(((a{1,200}){1,200}){1,200}){1,200}"},
    "conditions": {"anyOf": [{"anyOf": [{"anyOf": [{"minimum": n * m} for n in range(40)]}] * 10} for m in range(10)]},
}


def mixed_ids(size: int = 1_000_000) -> bytes:
    """Token ids with a text at the end: two complaints for each element, if all are collected (S3)."""
    return b'{"prompt": [' + b"1," * (size // 2) + b'"x"], "max_tokens": 1}'


def empty_messages(count: int = 300_000) -> bytes:
    """As many messages as fit into eight MiB (S10)."""
    return b'{"messages": [' + b",".join([b'{"role":"u","content":""}'] * count) + b'], "max_tokens": 1}'


BODIES: dict[str, bytes] = {
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep unknown field": b'{"prompt": "x", "max_tokens": 1, "z": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "half a body": b'{"prompt": "' + b"a" * 100_000,
    "huge integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "huge seed": b'{"prompt": "x", "max_tokens": 1, "seed": 1' + b"0" * 5000 + b"}",
    "huge exponent": b'{"prompt": "x", "max_tokens": 1, "temperature": 1e999999}',
    "not a number": b'{"prompt": "x", "max_tokens": 1, "temperature": NaN}',
    "negative zero ids": b'{"prompt": [-0, -1, 1e2], "max_tokens": 1}',
    "ids out of range": b'{"prompt": [2147483647, 99999999], "max_tokens": 1}',
    "lone surrogates": b'{"prompt": "' + b"\\ud800" * 1000 + b'", "max_tokens": 1}',
    "zero bytes": b'{"prompt": "' + b"\\u0000" * 10_000 + b'", "max_tokens": 1}',
    "combining marks": json.dumps({"prompt": "a" + "\u0301" * 50_000, "max_tokens": 1}).encode(),
    "ligature": json.dumps({"prompt": "\ufdfa" * 30_000, "max_tokens": 1}).encode(),
    "right to left": json.dumps({"prompt": "\u202e\u2066\u200f" * 10_000, "max_tokens": 1}).encode(),
    "not UTF-8": b'{"prompt": "' + b"\xff\xfe\x80" * 10_000 + b'"}',
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(STORY).encode(),
    "UTF-16": json.dumps(STORY).encode("utf-16"),
    "one long word": json.dumps({"prompt": "a" * 500_000, "max_tokens": 1}).encode(),
    "blanks": json.dumps({"prompt": " " * 500_000, "max_tokens": 1}).encode(),
    "many fields": json.dumps({"prompt": "x", "max_tokens": 1, **{f"f{n}": n for n in range(50_000)}}).encode(),
    "same field": b"{" + b'"prompt": "x",' * 50_000 + b'"max_tokens": 1}',
    "many stops": json.dumps({"prompt": "x", "max_tokens": 1, "stop": ["a" * 100] * 20_000}).encode(),
    "long stop": json.dumps({"prompt": "x", "max_tokens": 1, "stop": "a" * 1_000_000}).encode(),
    "many biases": json.dumps(
        {"prompt": "x", "max_tokens": 1, "logit_bias": {str(n): 1 for n in range(50_000)}}
    ).encode(),
    "many prompts": json.dumps({"prompt": ["x"] * 100_000, "max_tokens": 1}).encode(),
    "nested prompts": json.dumps({"prompt": [[1] * 10] * 20_000, "max_tokens": 1}).encode(),
    "many answers": b'{"prompt": "x", "max_tokens": 1, "n": 1000000}',
    "empty": b"",
    "null": b"null",
}

# name -> raw bytes of a connection. Hosts and keys are filled in; no answer may be one for a second, hidden request.
_HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: hidden\r\n\r\n"
SMUGGLING: dict[str, bytes] = {
    "length and chunks": b"POST /tokenize HTTP/1.1\r\n{head}Content-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _HIDDEN,
    "two lengths": b"POST /tokenize HTTP/1.1\r\n{head}Content-Length: 0\r\nContent-Length: 41\r\n\r\n" + _HIDDEN,
    "length list": b"POST /tokenize HTTP/1.1\r\n{head}Content-Length: 0, 41\r\n\r\n" + _HIDDEN,
    "negative length": b"POST /tokenize HTTP/1.1\r\n{head}Content-Length: -1\r\n\r\n" + _HIDDEN,
    "signed length": b"POST /tokenize HTTP/1.1\r\n{head}Content-Length: +0\r\n\r\n" + _HIDDEN,
    "hidden chunks": b"POST /tokenize HTTP/1.1\r\n{head}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + _HIDDEN,
    "odd chunks": b"POST /tokenize HTTP/1.1\r\n{head}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + _HIDDEN,
    "chunk size": b"POST /tokenize HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\nx\r\n",
    "bare newlines": b"GET /version HTTP/1.1\n{head}\n\n",
    "folded header": b"GET /version HTTP/1.1\r\n{head}X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n",
    "zero byte": b"GET /version HTTP/1.1\r\n{head}X-A: b\x00c\r\n\r\n",
    "no version": b"GET /version\r\n{head}\r\n",
    "absolute address": b"GET http://elsewhere.example/version HTTP/1.1\r\n{head}\r\n",
    "noise": bytes(range(256)) * 16 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
}
