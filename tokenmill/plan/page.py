"""The shell of a report: one HTML file with its style inside, tiles, sections, tables. No script, nothing from the net.

Knows nothing of plans. Used by report.py and simulation_report.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill import __version__
from tokenmill.errors import UserError


def write_page(path: Path | str, title: str, subtitle: str, badge: tuple[str, bool], body: Sequence[str]) -> None:
    """`badge`: a short verdict and whether it is a good one."""
    style = (resources.files("tokenmill.plan") / "data" / "report.css").read_text(encoding="utf-8")
    verdict, good = badge
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main><header>"
        f'<span class="badge {"good" if good else "bad"}">{escape(verdict)}</span>'
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>{''.join(body)}"
        f"<footer>tokenmill {__version__}. Intervals are P10 to P90 of measured over predicted; prices and quality "
        "ranges are dated priors: measure before you decide.</footer></main></body></html>"
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "give another --html") from None


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """(figure, what it is)."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in values
        )
        + "</div>"
    )


def section(title: str, content: str, note: str = "", wide: bool = False) -> str:
    noted = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{noted}{content}</section>"


def grid(sections: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(sections)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Numbers to the right, texts to the left."""
    numeric = [bool(rows) and all(isinstance(row[i], int | float) or row[i] is None for row in rows)
               for i in range(len(columns))]  # fmt: skip
    kind = [' class="number"' if each else "" for each in numeric]
    head = "".join(f"<th{kind[i]}>{escape(name)}</th>" for i, name in enumerate(columns))
    lines = ("".join(f"<td{kind[i]}>{escape(_text(value))}</td>" for i, value in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
