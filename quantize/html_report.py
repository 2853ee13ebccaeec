"""One self-contained HTML page: sections of tables, plots and texts, readable on light and dark screens.

Nothing is loaded from anywhere: the style is inline, plots are data URIs, there is no script. A page is a list of
`Section`s; whoever has more to say than quality (a release) adds its own.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

STYLE = """
:root { color-scheme: light dark; --ink: #1f2a31; --soft: #5b6b75; --line: #d9e0e4; --panel: #f5f7f8; --page: #fff;
  --good: #00704f; --bad: #b3361e; --mark: #fde7b8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaed; --soft: #9fb0ba; --line: #3a464d; --panel: #1d2429;
  --page: #14191d; --good: #4ecb9f; --bad: #ff8f73; --mark: #5b4a1c } }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--page); max-width: 66rem; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem;
  border-bottom: 1px solid var(--line); padding-bottom: .25rem } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
p { margin: .4rem 0; max-width: 52rem } .note { color: var(--soft) }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600 } td.number, th.number { text-align: right; white-space: nowrap }
.range { color: var(--soft); font-size: .86em } .range, .whole { white-space: nowrap }
img { max-width: 100%; height: auto; display: block; background: #fff; border: 1px solid var(--line);
  border-radius: 4px; margin: .8rem 0 }
pre { white-space: pre-wrap; background: var(--panel); padding: .6rem .8rem; border-radius: 4px; margin: .3rem 0 }
mark { background: var(--mark); color: inherit; padding: 0 .1em } code { font-size: .92em }
.pass { color: var(--good); font-weight: 600 } .fail { color: var(--bad); font-weight: 600 }
details > summary { cursor: pointer; color: var(--soft) }
"""


@dataclass(frozen=True)
class Html:
    """Markup that is already safe; plain strings are escaped wherever they are put."""

    markup: str


Cell = Html | str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under column titles; numbers are set to the right. `folded` shows it behind a click, under that title."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: str | None = None


@dataclass(frozen=True)
class Plot:
    """A PNG and what it shows, for those who cannot see it."""

    png: bytes
    alt: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `quiet` ones are remarks."""

    content: Html | str
    quiet: bool = False


@dataclass(frozen=True)
class Quote:
    """A text set apart, line breaks kept, under a title of its own."""

    title: str
    content: Html | str


Block = Table | Plot | Text | Quote


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def page(title: str, subtitle: Html | str, sections: Sequence[Section]) -> str:
    """The whole document; sections without blocks are left out."""
    body = "".join(
        f"<h2>{html.escape(section.title)}</h2>\n{''.join(_block(block) for block in section.blocks)}"
        for section in sections
        if section.blocks
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>"
        f'<p class="note">{escaped(subtitle)}</p>\n{body}</body></html>\n'
    )


def escaped(content: Html | str) -> str:
    """Markup as it is, text with its special characters escaped."""
    return content.markup if isinstance(content, Html) else html.escape(content)


def number(value: float | None, digits: int = 4) -> str:
    """A figure with `digits` significant digits; None is "not measured"."""
    return "not measured" if value is None else f"{value:,.{digits}g}"


def verdict(passed: bool) -> Html:
    """Pass or FAIL, coloured."""
    return Html('<span class="pass">pass</span>' if passed else '<span class="fail">FAIL</span>')


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Plot):
        data = base64.b64encode(block.png).decode()
        return f'<img alt="{html.escape(block.alt)}" src="data:image/png;base64,{data}">\n'
    if isinstance(block, Quote):
        return f"<h3>{html.escape(block.title)}</h3><pre>{escaped(block.content)}</pre>\n"
    return f"<p{_class('note', block.quiet)}>{escaped(block.content)}</p>\n"


def _class(name: str, applies: bool) -> str:
    return f' class="{name}"' if applies else ""


def _table(table: Table) -> str:
    numeric = [
        bool(table.rows) and all(isinstance(row[column], int | float | None) for row in table.rows)
        for column in range(len(table.columns))
    ]

    def cell(tag: str, value: Cell, right: bool) -> str:
        text = (
            number(value)
            if isinstance(value, float | None)
            else escaped(value if isinstance(value, Html) else str(value))
        )
        return f"<{tag}{_class('number', right)}>{text}</{tag}>"

    head = "".join(cell("th", title, right) for title, right in zip(table.columns, numeric, strict=True))
    rows = "".join(
        f"<tr>{''.join(cell('td', value, right) for value, right in zip(row, numeric, strict=True))}</tr>\n"
        for row in table.rows
    )
    markup = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n'
    if table.folded is None:
        return markup
    return f"<details><summary>{html.escape(table.folded)}</summary>{markup}</details>\n"
