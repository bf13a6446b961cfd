"""Write what follows from the specs: python docs/make_lists.py [--check].

The family table, in every page that has its markers; linattn_np/__init__.pyi, the names that type checkers see.
"""

from __future__ import annotations

import sys
from pathlib import Path

import linattn_np as la
from linattn_np import catalog

TOP = Path(__file__).resolve().parent.parent
PAGES = (TOP / "docs" / "family_table.md", TOP / "README.md")
STUB = TOP / "linattn_np" / "__init__.pyi"
BEGIN, END = "<!-- family table -->", "<!-- end -->"


def with_table(text: str) -> str:
    """`text` with the table between the markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{la.family_table()}\n{END}{after}"


def stub() -> str:
    """The public names as imports, for type checkers and editors."""
    homes = {name: home for name, home in la._HOMES.items() if name not in ("VARIANTS", "SPECS")}
    homes |= {name: f".variants.{home}" for name, home in catalog.modules().items()}
    homes |= {name: home.rpartition(".")[0] or "." for name, home in la._MODULES.items()}
    lines = [f"from {home} import {name} as {name}" for home, name in sorted((h, n) for n, h in homes.items())]
    lines.append("from .spec import VariantFunction as _VariantFunction")
    lines.sort(key=lambda line: (line.split()[1], line.split()[3]))
    return "\n".join(["# Written by `python docs/make_lists.py`.", "", *lines, "", "__version__: str",
                      "VARIANTS: tuple[_VariantFunction, ...]", "SPECS: tuple[VariantSpec, ...]", ""])


def main() -> int:
    """Write the files; with --check write nothing, and return 1 if one is out of date."""
    texts = {page: page.read_text("utf-8") for page in PAGES}
    found = {page: with_table(text) for page, text in texts.items()} | {STUB: stub()}
    texts[STUB] = STUB.read_text("utf-8") if STUB.exists() else ""
    stale = [page for page, text in found.items() if texts[page] != text]
    for page in stale:
        if "--check" in sys.argv[1:]:
            sys.stderr.write(f"{page.relative_to(TOP)} is out of date: run python docs/make_lists.py\n")
        else:
            page.write_text(found[page], "utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
