"""Flags of other engines on our command lines: rewritten to ours, or refused by name with what to use instead.

The table is peer_options.py; this file only knows how flags are written. A verb's own flags come first. Nothing is
declared per verb, so that help stays short and starts fast. Applied to the verbs that take engine options by main.py.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from tokenmill.errors import UserError
from tokenmill.peer_options import PEER_OPTIONS, SHORT_FLAGS, PeerOption, flag_text, means


def _spellings() -> dict[str, tuple[str, PeerOption, bool | None]]:
    """Flag -> (name, entry, the value of a switch)."""
    found: dict[str, tuple[str, PeerOption, bool | None]] = {
        text: (ours, PeerOption("", means(ours)), None) for text, ours in SHORT_FLAGS.items()
    }
    for name, peer in PEER_OPTIONS.items():
        for text in (flag_text(name), *peer.short):
            found[text] = name, peer, True if peer.is_switch else None
        if peer.is_switch:
            found[f"--no-{flag_text(name)[2:]}"] = name, peer, False
    return found


PEER_FLAGS = _spellings()


class PeerFlagsCommand(TyperCommand):
    """A verb that also understands the flags of other engines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {text for param in self.params for text in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, rewrite(args, own, ctx.command_path))


def accept_peer_flags(app: typer.Typer) -> None:
    """Every verb of the app, and of its groups, that takes engine options."""
    for command in app.registered_commands:
        if getattr(command.callback, "takes_engine_options", False):
            command.cls = PeerFlagsCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            accept_peer_flags(group.typer_instance)


def rewrite(arguments: list[str], own: set[str], verb: str) -> list[str]:
    """Arguments with other engines' flags replaced by ours. `own`: the flags that the verb has."""
    rewritten: list[str] = []
    meant: dict[str, str] = {}  # our flag -> how it was written
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            rewritten += [word, *waiting]
            break
        text, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = text if text in own else text[:2] + text[2:].replace("_", "-")
        if flag in own or flag not in PEER_FLAGS:
            rewritten.append(flag + equals + attached if flag in own else word)
            continue
        name, peer, value = PEER_FLAGS[flag]
        if value is None:
            if not equals and not waiting:
                raise UserError(f"{flag} needs a value", "write it after the flag")
            given: Any = attached if equals else waiting.pop(0)
            if peer.takes_several:
                given = [given]
                while waiting and not waiting[0].startswith("-"):
                    given.append(waiting.pop(0))
        else:
            given = value
        for ours, translated in peer.translate(name, given).items():
            wanted = flag_text(ours)
            if wanted not in own:
                raise UserError(f"{flag} means {wanted}, which `{verb}` does not take", f"leave {flag} out")
            if wanted in meant or wanted in (each.partition("=")[0] for each in arguments):
                raise UserError(f"{flag} is given twice (it means {wanted})", "keep one of them")
            meant[wanted] = flag
            rewritten += _written(ours, translated)
    return rewritten


def _written(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_text(name) if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, tuple):
        return [word for each in value for word in (flag_text(name), each)]
    return [flag_text(name), str(value)]
