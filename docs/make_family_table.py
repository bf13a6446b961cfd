"""Write the family table into every page that has its markers: python docs/make_family_table.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

import linattn_np as la

TOP = Path(__file__).resolve().parent.parent
PAGES = (TOP / "docs" / "family_table.md", TOP / "README.md")
BEGIN, END = "<!-- family table -->", "<!-- end -->"


def with_table(text: str) -> str:
    """`text` with the table between the markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{la.family_table()}\n{END}{after}"


def main() -> int:
    """Write the pages; with --check write nothing, and return 1 if one is out of date."""
    texts = {page: page.read_text("utf-8") for page in PAGES}
    stale = [page for page, text in texts.items() if with_table(text) != text]
    for page in stale:
        if "--check" in sys.argv[1:]:
            sys.stderr.write(f"{page.relative_to(TOP)} is out of date: run python docs/make_family_table.py\n")
        else:
            page.write_text(with_table(texts[page]), "utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
