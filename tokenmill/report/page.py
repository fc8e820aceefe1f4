"""The page of a report: one HTML file with its style inside, tiles, sections, tables. No script, nothing from the net.

Knows nothing of what is reported. Used by the reports of plan, simulate, optimize and bench.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.errors import UserError

_NUMBER = re.compile(r"[-+≤]?\$?[\d.,]+( ?(ms|s|%|MB|GiB))?")


@dataclass(frozen=True, slots=True)
class Tile:
    value: str
    label: str
    tone: str = ""  # "good" | "bad" | ""


def render_page(
    title: str, subtitle: str, body: Sequence[str], *, badge: tuple[str, bool] | None = None, footer: str = ""
) -> str:
    """`badge`: a short verdict and whether it is a good one."""
    style = (resources.files("tokenmill.report") / "report.css").read_text(encoding="utf-8")
    verdict = f'<span class="badge {"good" if badge[1] else "bad"}">{escape(badge[0])}</span>' if badge else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main><header>{verdict}"
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>{''.join(body)}"
        f"<footer>tokenmill {__version__}. {escape(footer)}</footer></main></body></html>\n"
    )


def write_page(path: Path | str, text: str, option: str = "--html") -> None:
    """`option`: the flag that named the file, for the remedy."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", f"give another {option}") from None


def tiles(values: Sequence[Tile]) -> str:
    shown = (
        f'<div class="tile"><b class="{tile.tone}">{escape(tile.value)}</b><span>{escape(tile.label)}</span></div>'
        for tile in values
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def section(title: str, content: str, note: str = "", wide: bool = False) -> str:
    """Nothing where there is no content."""
    if not content:
        return ""
    noted = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{noted}{content}</section>"


def grid(sections: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(sections)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], marked: int = -1) -> str:
    """Columns of numbers to the right, texts to the left. `marked`: the row that stands out."""
    if not rows:
        return ""
    kind = [' class="number"' if _is_numeric([row[i] for row in rows]) else "" for i in range(len(columns))]
    head = "".join(f"<th{kind[i]}>{escape(name)}</th>" for i, name in enumerate(columns))
    lines = ["".join(f"<td{kind[i]}>{escape(_text(value))}</td>" for i, value in enumerate(row)) for row in rows]
    body = "".join(
        f'<tr class="marked">{line}</tr>' if number == marked else f"<tr>{line}</tr>"
        for number, line in enumerate(lines)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)


def code_block(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"<pre>{escape(text)}</pre>" if text else ""


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _is_numeric(column: Sequence[Any]) -> bool:
    given = [value for value in column if value not in (None, "")]
    return bool(given) and all(
        _NUMBER.fullmatch(value) if isinstance(value, str) else isinstance(value, int | float) for value in given
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
