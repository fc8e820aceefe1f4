"""The doors through which untrusted input enters: what an input is, and what it must go through.

A door makes input number N from a seeded generator and tries it: True if it was accepted, UserError if it was refused;
anything else is a finding. Inputs are named byte strings, so that they can be saved. Used by processes.py.
"""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tokenmill.errors import UserError
from tools.fuzzing import corpus
from tools.fuzzing.mutations import mutate_bytes, mutate_json, mutate_text

Input = dict[str, bytes]
HTTP_SECONDS = 15.0
_TEXT = "Hello wörld <s></s> 你好\n\x00 a b"


class Finding(Exception):
    """A wrong outcome that is not an exception: an answer of the server that must not be."""


class Door:
    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        self.server = server  # URL, for the door that needs one
        self.prepare()

    def prepare(self) -> None: ...

    def make(self, random: Random) -> Input:
        raise NotImplementedError

    def attempt(self, data: Input) -> bool:
        raise NotImplementedError

    def _write(self, data: Input) -> Path:
        for name, content in data.items():
            (self.folder / name).write_bytes(content)
        return self.folder


class GGUF(Door):
    def prepare(self) -> None:
        from tokenmill.checkpoint.gguf import GGUFCheckpoint

        self.files = []
        for architecture, vocabulary in (("llama", "gpt2"), ("gemma3", "gpt2"), ("qwen3", "llama")):
            path = self.folder / "model.gguf"
            data = corpus.write_gguf(path, architecture, vocabulary)
            checkpoint = GGUFCheckpoint(path)
            self.files.append((data, len(data) - sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())))

    def make(self, random: Random) -> Input:
        data, head = random.choice(self.files)
        return {"model.gguf": mutate_bytes(random, data, [data[:head]], head)}

    def attempt(self, data: Input) -> bool:
        from tokenmill.checkpoint.open import open_checkpoint

        path = self._write(data) / "model.gguf"
        checkpoint = open_checkpoint(path)
        _touch(checkpoint)
        _touch_tokenizer(path)
        return True


class Safetensors(Door):
    def prepare(self) -> None:
        self.header, self.tensors = corpus.safetensors_header()
        text = json.dumps(self.header).encode()
        self.file = struct.pack("<Q", len(text)) + text + self.tensors
        self.index = {
            "metadata": {},
            "weight_map": dict.fromkeys(self.header.keys() - {"__metadata__"}, "a.safetensors"),
        }
        self._write({"config.json": json.dumps(corpus.CONFIGS[0]).encode()})

    def make(self, random: Random) -> Input:
        kind = random.random()
        if kind < 0.3:
            return {
                "model.safetensors": mutate_bytes(random, self.file, [self.file], len(self.file) - len(self.tensors))
            }
        if kind < 0.85:
            text = mutate_json(random, self.header, [self.header]).encode(errors="surrogatepass")
            return {"model.safetensors": struct.pack("<Q", len(text)) + text + self.tensors}
        index = mutate_json(random, self.index, [self.index, self.header])
        return {"a.safetensors": self.file, "model.safetensors.index.json": index.encode(errors="surrogatepass")}

    def attempt(self, data: Input) -> bool:
        from tokenmill.checkpoint.open import open_checkpoint

        for name in ("model.safetensors", "a.safetensors", "model.safetensors.index.json"):
            (self.folder / name).unlink(missing_ok=True)
        _touch(open_checkpoint(self._write(data)))
        return True


class Config(Door):
    def prepare(self) -> None:
        header, tensors = corpus.safetensors_header()
        text = json.dumps(header).encode()
        self._write({"model.safetensors": struct.pack("<Q", len(text)) + text + tensors})

    def make(self, random: Random) -> Input:
        config = mutate_json(random, random.choice(corpus.CONFIGS), corpus.CONFIGS)
        generation = mutate_json(random, {"eos_token_id": [1, 2], "bos_token_id": 1}, corpus.CONFIGS)
        return {
            "config.json": config.encode(errors="surrogatepass"),
            "generation_config.json": generation.encode(errors="surrogatepass") if random.random() < 0.2 else b"{}",
        }

    def attempt(self, data: Input) -> bool:
        from tokenmill.checkpoint.open import open_checkpoint

        checkpoint = open_checkpoint(self._write(data))
        _touch(checkpoint)
        checkpoint.quantization()
        return True


class TokenizerFiles(Door):
    def prepare(self) -> None:
        self.pairs = corpus.tokenizer_documents()
        self.documents = [document for pair in self.pairs for document in pair]

    def make(self, random: Random) -> Input:
        tokenizer, config = random.choice(self.pairs)
        texts = [json.dumps(tokenizer), json.dumps(config)]
        which = random.randrange(2)
        texts[which] = mutate_json(random, (tokenizer, config)[which], self.documents)
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: text.encode(errors="surrogatepass") for name, text in zip(names, texts, strict=True)}

    def attempt(self, data: Input) -> bool:
        _touch_tokenizer(self._write(data))
        return True


class Templates(Door):
    def make(self, random: Random) -> Input:
        messages = corpus.MESSAGES
        text = mutate_json(random, messages, [messages]) if random.random() < 0.3 else json.dumps(messages)
        source = random.choice(corpus.TEMPLATES)
        if random.random() < 0.9:
            source = mutate_text(random, source, corpus.TEMPLATES)
        return {"template": source.encode(errors="surrogatepass"), "messages": text.encode(errors="surrogatepass")}

    def attempt(self, data: Input) -> bool:
        from tokenmill.checkpoint.chat_template import ChatTemplate

        try:
            messages = json.loads(data["messages"])
        except (ValueError, RecursionError):
            raise UserError("the messages are not JSON", "correct them") from None
        template = ChatTemplate(data["template"].decode(errors="surrogatepass"), "<s>", "</s>")
        template.render(messages, tools=[{"type": "function", "function": {"name": "f"}}])
        return True


class Structured(Door):
    """Grammars, regular expressions and schemas: compiled, then followed for some tokens."""

    kind = ""
    sources: Sequence[Any] = ()

    def prepare(self) -> None:
        from tokenmill.grammar.compiler import GrammarCompiler

        self.compiler = GrammarCompiler(_Bytes(), [256])
        self.compiler.prepare()

    def make(self, random: Random) -> Input:
        source = random.choice(self.sources)
        if self.kind == "json_schema":
            text = mutate_json(random, source, self.sources)
        else:
            text = mutate_text(random, source, self.sources)
        return {"text": text.encode(errors="surrogatepass"), "tokens": random.randbytes(8)}

    def attempt(self, data: Input) -> bool:
        from tokenmill.types import StructuredSpec

        spec = StructuredSpec(self.kind, data["text"].decode(errors="surrogatepass"))
        matcher = self.compiler.compile(spec).matcher()
        for byte in data["tokens"]:
            matcher.compute_bitmask()
            if not matcher.try_consume_tokens([byte % 128]):
                break
        return True


class Grammars(Structured):
    kind = "grammar"
    sources = corpus.GRAMMARS


class Regexes(Structured):
    kind = "regex"
    sources = corpus.REGEXES


class Schemas(Structured):
    kind = "json_schema"
    sources = corpus.SCHEMAS


class Bodies(Door):
    """Bodies of every route of a running server. A 5xx, a dropped connection or no answer is a finding."""

    def prepare(self) -> None:
        self.connection: http.client.HTTPConnection | None = None
        self.documents = [body for _, body in corpus.BODIES]

    def make(self, random: Random) -> Input:
        path, body = random.choice(corpus.BODIES)
        text = mutate_json(random, body, self.documents).encode(errors="surrogatepass")
        if random.random() < 0.05:
            text = mutate_bytes(random, text, [text])
        return {"path": path.encode(), "body": text}

    def attempt(self, data: Input) -> bool:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(urlsplit(self.server).netloc, timeout=HTTP_SECONDS)
        try:
            self.connection.request("POST", data["path"].decode(), data["body"], {"content-type": "application/json"})
            answer = self.connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            self.connection = None
            raise Finding(f"no answer: {error!r}") from None
        if answer.status >= 500 or b'"internal_error"' in text or b'"service_unavailable"' in text:
            raise Finding(f"{answer.status}: {text[:200]!r}")
        if answer.status >= 400:
            raise UserError(f"{answer.status}")
        return True


class _Bytes:
    """A vocabulary of bytes."""

    vocab_size = 257
    bos_id = None
    special_ids = frozenset({256})
    adds_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"</s>"

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:  # noqa: ARG002
        return list(text.encode())


# Door and its share of all inputs.
DOORS: dict[str, tuple[Callable[[Path, str], Door], int]] = {
    "gguf": (GGUF, 20),
    "safetensors": (Safetensors, 16),
    "config": (Config, 14),
    "tokenizer": (TokenizerFiles, 12),
    "template": (Templates, 12),
    "grammar": (Grammars, 6),
    "regex": (Regexes, 6),
    "schema": (Schemas, 6),
    "http": (Bodies, 8),
}


def _touch(checkpoint: Any) -> None:
    """What a loader does first: every tensor mapped, the description read."""
    for name in checkpoint.names():
        stored = checkpoint.tensor(name)
        if stored.data.numel():
            stored.data.reshape(-1)[-1].clone()
        checkpoint.release(name)
    description = checkpoint.description
    description.features()
    repr(description)


def _touch_tokenizer(path: Path) -> None:
    from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer

    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(_TEXT)
    tokenizer.encode(_TEXT, parse_special=True)
    tokenizer.decode(ids, skip_special_tokens=False)
    tokenizer.decode(range(min(tokenizer.vocab_size, 1000)))
    template = load_chat_template(path)
    if template is not None:
        template.render(corpus.MESSAGES[:2])
