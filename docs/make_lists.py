"""Write what follows from the specs: python docs/make_lists.py [--check].

The family table, in every page that has its markers; docs/reference, one section a function, from its docstring;
linattn_np/__init__.pyi, the names that type checkers see.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import linattn_np as la
from linattn_np import catalog
from linattn_np.call.options import COMMON

TOP = Path(__file__).resolve().parent.parent
PAGES = (TOP / "docs" / "family_table.md", TOP / "README.md")
REFERENCE = TOP / "docs" / "reference"
STUB = TOP / "linattn_np" / "__init__.pyi"
BEGIN, END = "<!-- family table -->", "<!-- end -->"


def with_table(text: str) -> str:
    """`text` with the table between the markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{la.family_table()}\n{END}{after}"


def section(name: str, thing: Any) -> str:
    """A heading, the signature, and the docstring as it is."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) or not callable(thing):
        head = name
    else:
        parameters = inspect.signature(thing).parameters.values()
        words = [str(p.replace(annotation=p.empty)) for p in parameters if p.name not in COMMON]
        options = ["**options"] if any(p.name in COMMON for p in parameters) else []
        head = f"{name}({', '.join([*words, *options])})"
    return f"## {name.removeprefix('la.')}\n\n```text\n{head}\n\n{text}\n```\n"


def reference() -> dict[Path, str]:
    """The pages of docs/reference."""
    from linattn_np.ops import feature_maps, gate_formula, gates, norms

    intro = "Written from the docstrings by `docs/make_lists.py`; `help(la.{})` shows the same text.\n"
    variants = [section(f"la.{fn.__name__}", fn) for fn in sorted(la.VARIANTS, key=lambda fn: fn.__name__)]
    names = sorted(n for n in la._HOMES if n not in ("SPECS", "VARIANTS"))
    names.sort(key=lambda n: inspect.isclass(getattr(la, n)))  # functions first
    others = [section(f"la.{n}", getattr(la, n)) for n in names]
    tests = [section(f"la.testing.{n}", f) for n, f in own(la.testing)]
    modules = (feature_maps, gates, gate_formula, norms)
    ops = [section(f"{m.__name__}.{n}", f) for m in modules for n, f in own(m)]
    options = "`**options` are the [common options](functions.md#options).\n"
    pages = {
        "variants.md": ["# Variants\n", intro.format("gla") + options, *variants],
        "functions.md": ["# Functions of functions\n", intro.format("vjp"), *others],
        "testing.md": ["# Testing\n", intro.format("testing"), *tests],
        "ops.md": ["# Feature maps, gates, norms\n", intro.format("feature_maps"), *ops],
    }
    return {REFERENCE / name: "\n".join(parts) for name, parts in pages.items()}


def own(module: Any) -> list[tuple[str, Any]]:
    """The public functions and classes of a module that have a docstring."""
    every = [(n, x) for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return [(n, x) for n, x in every if not n.startswith("_") and inspect.getdoc(x)]


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
    found |= reference()
    texts |= {page: page.read_text("utf-8") if page.exists() else "" for page in found if page not in texts}
    stale = [page for page, text in found.items() if texts[page] != text]
    for page in stale:
        if "--check" in sys.argv[1:]:
            sys.stderr.write(f"{page.relative_to(TOP)} is out of date: run python docs/make_lists.py\n")
        else:
            page.parent.mkdir(exist_ok=True)
            page.write_text(found[page], "utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
