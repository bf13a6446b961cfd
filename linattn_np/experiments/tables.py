"""Text and tables, on the terminal and in Markdown."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

NOT_A_TERMINAL = 160  # columns of a table in a file or a pipe


class TextTable(NamedTuple):
    """Cells of text; the first `left` columns are justified left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 2
    sections: bool = False  # a rule where the first column changes


def write_table(table: TextTable) -> None:
    """The table on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=box.SIMPLE, title=table.title or None, title_justify="left")
    for n, name in enumerate(table.columns):
        grid.add_column(name, justify="left" if n < table.left else "right", overflow="fold")
    for row, following in zip(table.rows, [*table.rows[1:], None], strict=True):
        ends = table.sections and following is not None and row[0] != following[0]
        grid.add_row(*row, end_section=ends)
    console = Console()
    if not console.is_terminal:  # as wide as its rows, so that no cell is cut or broken
        wide = Console(width=1 << 16)
        console = Console(width=max(NOT_A_TERMINAL, wide.measure(grid).maximum))
    console.print(grid)


def markdown_table(table: TextTable) -> str:
    """The table in Markdown, columns aligned in the source."""
    cells = [table.columns, *table.rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(table.columns))]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(
                x.ljust(w) if n < table.left else x.rjust(w) for n, (x, w) in enumerate(zip(row, widths, strict=True))
            )
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([f"**{table.title}**", "", line(table.columns), rule, *map(line, table.rows), ""])


def write_text(text: str, indent: str = "") -> None:
    """A paragraph on standard output, broken into lines on a terminal alone."""
    if sys.stdout.isatty():
        width = min(110, shutil.get_terminal_size().columns)
        further = indent + "  " if indent else ""
        text = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
    else:
        text = indent + text
    sys.stdout.write(text + "\n")
