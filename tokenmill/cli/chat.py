"""`tokenmill chat`: a conversation on a terminal, or one turn per line of a pipe."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options, sampling_options
from tokenmill.cli.output import print_error, print_json
from tokenmill.cli.progress import print_note
from tokenmill.cli.run import MAX_TOKENS
from tokenmill.cli.streaming import Streamer, answer_footer, answer_record
from tokenmill.config import ADAPTER_MEMORY, EngineConfig
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

_HELP = "/system TEXT sets the system message, /reset forgets the conversation, /exit leaves; Ctrl-C stops an answer."


@dataclass(slots=True)
class Conversation:
    """What has been said. A system message survives a reset."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + self.turns


@sampling_options(without=("n", "logprobs"), max_tokens=MAX_TOKENS, temperature=0.7)
@engine_options(without=("seed", *ADAPTER_MEMORY), concurrency=1, speculate="auto")
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    engine: EngineConfig,
    params: SamplingParams,
) -> None:
    """Talk with a model. In a pipe, each line is one turn.

    In the conversation: /system TEXT, /reset, /exit; Ctrl-C stops the current answer only.
    """
    with Streamer(model, engine) as streamer:
        streamer.render([{"role": "user", "content": "?"}])  # refuse a base model before the first turn
        session = _Session(streamer, params, Conversation(system), as_json)
        if sys.stdin.isatty():
            session.talk()
        else:
            for line in sys.stdin:
                if not session.take(line.strip()):
                    break
    if as_json:
        print_json({"messages": session.conversation.messages(), "turns": session.answers})


class _Session:
    def __init__(self, streamer: Streamer, params: SamplingParams, conversation: Conversation, as_json: bool) -> None:
        self.streamer = streamer
        self.params = params
        self.conversation = conversation
        self.answers: list[dict[str, Any]] = []
        self._as_json = as_json

    def talk(self) -> None:
        """The loop on a terminal: errors are shown and the conversation goes on."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        print_note(_HELP)
        while True:
            try:
                sys.stderr.write("> ")
                sys.stderr.flush()
                if not self.take(input().strip()):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                print_note("\n/exit or Ctrl-D leaves")
            except UserError as error:
                print_error(error.problem, error.remedy)

    def take(self, line: str) -> bool:
        """One line: a command or a turn. False: leave."""
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self.conversation.turns.clear()
        elif command == "/system":
            self.conversation.system = rest.strip() or None
        elif command == "/help":
            print_note(_HELP)
        elif command.startswith("/") and command[1:].isalpha():
            raise UserError(f"unknown command {command}", _HELP)
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        turns = self.conversation.turns
        turns.append({"role": "user", "content": line})
        try:
            prompt = self.streamer.render(self.conversation.messages())
            answer = self.streamer.stream(prompt, self.params, True, self._write)
        except UserError as error:
            turns.pop()  # a turn that was refused was not said
            raise UserError(error.problem, f"{error.remedy}, or start over with /reset") from None
        if not self._as_json:
            print(flush=True)
        if answer.output is None:
            turns.pop()
            return
        record = answer_record(answer.output)
        turns.append({"role": "assistant", "content": record["text"]})
        self.answers.append(record)
        print_note(answer_footer(record, answer.interrupted))

    def _write(self, _index: int, text: str) -> None:
        if not self._as_json:
            sys.stdout.write(text)
            sys.stdout.flush()
