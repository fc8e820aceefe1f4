"""The `tokenmill` command: registers the verbs and turns failures into two lines and an exit code.

Exit 0: done; 2: bad input, with the remedy; 1: a bug of ours; 130: interrupted. `error: MESSAGE` and `try: REMEDY` go
to stderr. Only the verb that is asked for is imported, and it imports the engine only when it runs, so that help is
instant.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from tokenmill import __version__
from tokenmill.cli.extras import missing_extra
from tokenmill.cli.help import VerbGroup
from tokenmill.cli.output import print_error
from tokenmill.cli.peer_flags import PEER_FLAGS, PeerFlagsCommand, accept_peer_flags
from tokenmill.errors import UserError
from tokenmill.log import configure, get_logger

# Typer carries its own copy of click or uses the installed one, by version: this is the usage error of either.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_VERBS = {  # module and function; of a group, its Typer
    "pull": "pull:pull",
    "run": "run:run",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "route": "route:route",
    "run-batch": "run_batch:run_batch",
    "embed": "embed:embed",
    "ps": "served_models:ps",
    "stop": "served_models:stop",
    "list": "local_models:list_models",
    "rm": "local_models:remove_model",
    "plan": "plan:plan",
    "deploy": "deploy:deploy",
    "simulate": "simulate:simulate",
    "quantize": "quantize:quantize",
    "optimize": "optimize:optimize",
    "convert": "convert:convert",
    "finetune": "finetune:finetune",
    "train-draft": "train_draft:train_draft",
    "inspect": "inspection:inspect",
    "doctor": "doctor:doctor",
    "ray": "ray:app",
    "bench": "bench:app",
    "eval": "evaluation:app",
}


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """The command with all its verbs, or with the one that `words` begin with: the others need not be imported."""
    app = typer.Typer(
        name="tokenmill",
        cls=VerbGroup,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in words[:1] if words[:1] and words[0] in _VERBS else _VERBS:
        module, _, attribute = _VERBS[name].partition(":")
        verb = getattr(import_module(f"tokenmill.cli.{module}"), attribute)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    accept_peer_flags(app)
    app.callback(invoke_without_command=True)(root)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tokenmill {__version__}")
        raise typer.Exit


def root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    configure()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not end an answer
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = make_app(words)(words, "tokenmill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(error.problem, error.remedy, 2)
    except UsageError as error:
        return _fail(*_explain_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (explained := missing_extra(error, words)) is not None:
            return _fail(*explained, 2)
        if get_logger("tokenmill").isEnabledFor(20):
            import traceback

            traceback.print_exc()
        return _fail(
            f"internal error, {type(error).__name__}: {error}",
            "the same command with --verbose, and report it together with the output of `tokenmill doctor`",
            1,
        )


def _fail(message: str, remedy: str, code: int) -> int:
    sys.stdout.flush()
    print_error(message, remedy)
    return code


def _explain_usage(error: Any) -> tuple[str, str]:
    """Click's message in one line, and the nearest valid flag or verb with where to read on."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tokenmill"
    message = error.format_message().split(" (Possible options")[0].split(" Did you mean")[0].rstrip(".")
    near = _nearest(error, context)
    return message, f"{near}, or see `{path} --help`" if near else f"`{path} --help`"


def _nearest(error: Any, context: Any) -> str | None:
    if context is None:
        return None
    flag = getattr(error, "option_name", None)
    if flag is not None:
        valid = [text for param in context.command.params for text in (*param.opts, *param.secondary_opts)]
        valid += PEER_FLAGS if isinstance(context.command, PeerFlagsCommand) else ()
        found = difflib.get_close_matches(flag, [text for text in valid if text.startswith("--")], n=1, cutoff=0.5)
        return found[0] if found else None
    verbs = getattr(context.command, "commands", None)
    typed = error.format_message().partition("'")[2].partition("'")[0]
    offered = [verb for verb in verbs or () if verb != "rm"]  # what deletes is not offered for a slip of the finger
    found = difflib.get_close_matches(typed, offered, n=1, cutoff=0.5) if typed else []
    return f"`{context.command_path} {found[0]}`" if found else None


if __name__ == "__main__":
    sys.exit(main())
