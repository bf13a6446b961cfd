"""Write what follows from the specs: python docs/make_lists.py [--check].

The family table and the table of cells, in every page that has their markers; a section of docs/variants.md for each
variant that has none there; docs/reference, one section a function, from its docstring;
linattn_np/__init__.pyi and linattn_np/nn/__init__.pyi, the names that type checkers see.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import linattn_np as la
from linattn_np.call.options import COMMON
from linattn_np.docstring import core_of
from linattn_np.elementwise.core import CORE as ELEMENTWISE
from linattn_np.matrix_state.types import Decay, Erase, Readout

TOP = Path(__file__).resolve().parent.parent
VARIANTS = TOP / "docs" / "variants.md"
PAGES = (TOP / "docs" / "family_table.md", VARIANTS)
REFERENCE = TOP / "docs" / "reference"
STUB, PIECES = TOP / "linattn_np" / "__init__.pyi", TOP / "linattn_np" / "nn" / "__init__.pyi"
END = "<!-- end -->"
RAISES = "Raises ValueError or TypeError for shapes, dtypes and options that do not fit.\n"
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """Variant -> heading of its section."""
    return {name: heading for heading in HEADING.findall(text) for name in heading.split(", ")}


def skeleton(spec: la.VariantSpec) -> str:
    """The section of a variant that follows from its spec, to start from."""
    source = [f"{spec.paper}.", ""] if spec.paper else []
    lines = [f"## {spec.name}", "", *source, "```text",
             *(line.strip() for line in spec.equation.split(";")), "```", "",
             f"{spec.sentence} Core: {core_of(spec)}.", "", f"**Scale.** {_scale(spec)}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _scale(spec: la.VariantSpec) -> str:
    return "$K^{-1/2}$" if spec.scaled else "1"


def cells(text: str) -> str:
    """The functions by decay and erase, with a read-out that is not linear."""
    rows = ["| | " + " | ".join(f"erase {erase.name}" for erase in Erase) + " |", "|---" * (1 + len(Erase)) + "|"]
    in_cells = [s for s in la.SPECS if s.core is not ELEMENTWISE]
    for decay in Decay:
        found = [", ".join(_with_readout(s) for s in in_cells if (s.decay, s.erase) == (decay, erase))
                 for erase in Erase]  # fmt: skip
        rows.append(" | ".join([f"| decay {decay.name}", *found]).rstrip() + " |")
    return "\n".join(rows) + "\n"


def _with_readout(spec: la.VariantSpec) -> str:
    plain = spec.readout is Readout.LINEAR
    return f"`{spec.name}`" if plain else f"`{spec.name}` ({spec.readout.name})"


TABLES: dict[str, Callable[[str], str]] = {  # marker -> what stands after it
    "family table": lambda text: la.family_table(), "cells": cells,
}  # fmt: skip


def with_tables(text: str) -> str:
    """`text` with what stands between its markers."""
    for name, table in TABLES.items():
        begin = f"<!-- {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            _, after = rest.split(END, 1)
            text = f"{before}{begin}\n\n{table(text)}\n{END}{after}"
    return text


def with_sections(text: str) -> str:
    """docs/variants.md with a section for each variant."""
    known = sections(text)
    return text + "".join("\n" + skeleton(spec) for spec in la.SPECS if spec.name not in known)


def signature(fn: Any) -> inspect.Signature:
    """The signature without types; the common options of a variant are **options, those of a piece are left out."""
    whole = inspect.signature(fn)
    hidden = COMMON if hasattr(fn, "spec") else la.nn.COMMON if hasattr(fn, "piece") else ()
    own = [p.replace(annotation=p.empty) for n, p in whole.parameters.items() if n not in hidden]
    if hasattr(fn, "spec"):
        own.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    return whole.replace(parameters=own, return_annotation=whole.empty)


def section(name: str, thing: Any) -> str:
    """A heading, the signature, and the docstring as it is."""
    text = inspect.getdoc(thing) or ""
    head = name if inspect.isclass(thing) or not callable(thing) else f"{name}{signature(thing)}"
    return f"## {name.removeprefix('la.')}\n\n```text\n{head}\n\n{text}\n```\n"


def reference() -> dict[Path, str]:
    """The pages of docs/reference."""
    intro = "Written from the docstrings by `docs/make_lists.py`; `help(la.{})` shows the same text.\n"
    variants = [section(f"la.{fn.__name__}", fn).replace(RAISES, "")
                for fn in sorted(la.VARIANTS, key=lambda fn: fn.__name__)]  # fmt: skip
    names = sorted(n for n in la._HOMES if n not in ("SPECS", "VARIANTS"))
    names.sort(key=lambda n: inspect.isclass(getattr(la, n)))  # functions first
    others = [section(f"la.{n}", getattr(la, n)) for n in names]
    tests = [section(f"la.testing.{n}", f) for n, f in own(la.testing)]
    pieces = [section(f"la.nn.{n}", getattr(la.nn, n)) for n in la.nn.__all__]
    of_pieces = f"{inspect.getdoc(la.nn)}\n\nEvery function: {RAISES}"
    options = ("`**options` are the [common options](functions.md#options). Every function raises\n"
               "ValueError or TypeError for shapes, dtypes and options that do not fit.\n")  # fmt: skip
    pages = {
        "variants.md": ["# Variants\n", intro.format("gla") + options, *variants],
        "functions.md": ["# Functions of functions\n", intro.format("vjp"), *others],
        "nn.md": ["# Pieces of layers: la.nn\n", intro.format("nn.rms_norm"), _as_markdown(of_pieces), *pieces],
        "testing.md": ["# Testing\n", intro.format("testing"), *tests],
    }
    return {REFERENCE / name: "\n".join(parts) for name, parts in pages.items()}


def _as_markdown(text: str) -> str:
    """A docstring with its indented lines as code."""
    return re.sub(
        r"(?m)((?:^    .*\n)+)", lambda found: "```text\n" + re.sub("(?m)^    ", "", found[1]) + "```\n", text
    )


def own(module: Any) -> list[tuple[str, Any]]:
    """The public functions and classes of a module that have a docstring."""
    every = [(n, x) for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return [(n, x) for n, x in every if not n.startswith("_") and inspect.getdoc(x)]


LITERALS = {
    "layout": 'Literal["time_first", "heads_first"]', "precision": 'Literal["tf32"] | None',
    "backend": 'Literal["reference", "chunks", "numba", "cuda"] | None',
    "chunk_states": 'Literal["loop", "scan"] | None',
    "chunk_size": 'int | Literal["parallel"] | None', "scale": "float | None", "num_threads": "int | None",
    "return_lse": "Literal[False]",
}  # fmt: skip
STATED = ("return_state", "return_states_at")


def class_of(fn: Any) -> str:
    """'_GatedDeltaRule'."""
    return "_" + "".join(word.capitalize() for word in fn.__name__.split("_"))


def call(arrays: str, options: str, result: str) -> list[str]:
    """One overload of a call."""
    return ["    @overload", "    def __call__(", f"        self, {arrays}, *, {options}", f"    ) -> {result}: ..."]


def typed(fn: Any) -> list[str]:
    """The class of a variant's function and that of its gradients, for type checkers."""
    spec, name = fn.spec, class_of(fn)
    arrays = []
    for n, arg in spec.arrays.items():
        kind = "A" if n == spec.change.value else "Any"
        arrays.append(f"{n}: {kind}" + " = ..." * arg.optional)
    options = {**spec.options, **COMMON}
    words = [
        f"{n}: {LITERALS.get(n, 'bool' if isinstance(v, bool) else 'Any')} = ..."
        for n, v in options.items()
        if n not in STATED
    ]
    rest = ", ".join(words)
    calls = [("return_state: Literal[False] = ..., return_states_at: None = ...", "A"),
             ("return_state: Literal[True], return_states_at: None = ...", "Result[A]"),
             ("return_state: bool = ..., return_states_at: Any", "StatesResult[A]"),
             ("return_state: bool, return_states_at: None = ...", "A | Result[A]")]  # fmt: skip
    lines = [f"class {name}Gradients(NamedTuple):", *(f"    {n}: Any" for n in (*spec.arrays, "state")), "",
             f"class {name}:", f'    """{spec.sentence} {spec.equation}"""', "", "    __name__: str",
             "    spec: VariantSpec", "    samples: _Samples"]  # fmt: skip
    every = ", ".join(arrays)
    if spec.change.query is not None:  # without queries the state alone
        lines += call(
            every.replace(f"{spec.change.query}: Any", f"{spec.change.query}: None"),
            "return_state: bool = ..., return_states_at: None = ..., " + rest,
            "Result[None]",
        )
    for stated, result in calls:
        lines += call(every, f"{stated}, {rest}", result)
    if "return_lse" in options:  # named tuples that begin with out and lse
        states = "return_state: bool = ..., return_states_at: Any = ..., "
        lines += call(
            every, states + rest.replace("return_lse: Literal[False] = ...", "return_lse: Literal[True]"), "Any"
        )
    return [*lines, "", f"{fn.__name__}: {name}", ""]


def typed_vjp(fns: list[Any]) -> list[str]:
    """The overloads of vjp: the gradients of each variant by name."""
    lines = []
    for fn in fns:
        name = class_of(fn)
        lines += ["@overload", f"def vjp(fn: {name}, *arrays: Any, **options: Any) -> "
                  f"tuple[Any, Callable[..., {name}Gradients]]: ..."]  # fmt: skip
    return [
        *lines,
        "@overload",
        "def vjp(fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Callable[..., Any]]: ...",
        "",
    ]


def stub() -> str:
    """The public names with their types, for type checkers and editors."""
    homes = {name: home for name, home in la._HOMES.items() if name not in ("VARIANTS", "SPECS", "vjp")}
    homes |= {name: home.rpartition(".")[0] or "." for name, home in la._MODULES.items()}
    fns = sorted(la.VARIANTS, key=lambda fn: fn.__name__)
    lines = [f"from {home} import {name} as {name}" for home, name in sorted((h, n) for n, h in homes.items())]
    lines += ["from .spec import Samples as _Samples", "from .spec import VariantFunction as _VariantFunction"]
    lines.sort(key=lambda line: (line.split()[1], line.split()[3]))
    head = [
        "# Written by `python docs/make_lists.py`.", "# ruff: noqa: E501", "",
        "from collections.abc import Callable",
        "from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload", "", *lines, "",
        "__version__: str", "VARIANTS: tuple[_VariantFunction, ...]", "SPECS: tuple[VariantSpec, ...]", "",
        'A = TypeVar("A")', "", "class Result(NamedTuple, Generic[A]):", "    out: A", "    state: Any", "",
        "class StatesResult(NamedTuple, Generic[A]):", "    out: A", "    state: Any", "    states: Any", "",
    ]  # fmt: skip
    every = [line for fn in fns for line in typed(fn)]
    return "\n".join([*head, *every, *typed_vjp(fns)])


def typed_piece(fn: Any) -> list[str]:
    """The overloads of a piece: with and without its final state."""
    parameters = list(inspect.signature(fn).parameters.values())
    first, keywords = fn.piece.names[0], [p for p in parameters if p.kind is p.KEYWORD_ONLY]

    def lines(more: dict[str, str], result: str) -> list[str]:
        words = []
        for p in parameters:
            kind = more.get(p.name) or ("A" if p.name == first else p.annotation)
            if keywords and p is keywords[0]:
                words.append("*")
            words.append(f"{p.name}: {kind}" + ("" if p.default is p.empty else " = ..."))
        sentence = (inspect.getdoc(fn) or "").splitlines()[0]
        return [f"def {fn.__name__}({', '.join(words)}) -> {result}:", f'    """{sentence}"""', "    ..."]

    if "state" not in fn.piece.axes:
        return [*lines({}, "A"), ""]
    both = [("Literal[False]", "A"), ("Literal[True]", "Result[A]"), ("bool", "Any")]
    found = [line for kind, result in both for line in ["@overload", *lines({"return_state": kind}, result)]]
    return [*found, ""]


def stub_of_pieces() -> str:
    """The public names of linattn_np.nn with their types."""
    head = ["# Written by `python docs/make_lists.py`.", "# ruff: noqa: E501", "",
            "from typing import Any, Literal, TypeVar, overload", "", "from .. import Result", "",
            "COMMON: dict[str, Any]", "__all__: list[str]", 'A = TypeVar("A")', ""]  # fmt: skip
    every = [line for name in la.nn.__all__ for line in typed_piece(getattr(la.nn, name))]
    text = "\n".join([*head, *every])
    for stated in ("Literal[True]", "bool"):
        text = text.replace(f", return_state: {stated} = ...", f", return_state: {stated}")
    return text


def main() -> int:
    """Write the files; with --check write nothing, and return 1 if one is out of date."""
    texts = {page: page.read_text("utf-8") for page in PAGES}
    found = {page: with_tables(with_sections(text) if page == VARIANTS else text) for page, text in texts.items()}
    found[STUB], found[PIECES] = stub(), stub_of_pieces()
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
