"""The list of variants: every function in a file of variants/<folder>/ under the decorator `public`.

Files are searched without being imported. Modules are imported on first use: `catalog.gla` imports
variants/no_erase/gla.py, VARIANTS and SPECS import all.
"""

from __future__ import annotations

import functools
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import VariantFunction, VariantSpec

FOLDER = Path(__file__).parent / "variants"
PUBLIC = re.compile(r"^@public\(.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)


@functools.cache
def modules() -> dict[str, str]:
    """Function -> module in variants/, from the text of the files."""
    return {
        name: f"{path.parent.name}.{path.stem}"
        for path in sorted(FOLDER.glob("*/*.py"))
        for name in PUBLIC.findall(path.read_text("utf-8"))
    }


def __getattr__(name: str) -> Any:
    if name == "VARIANTS":
        return variants()
    if name == "SPECS":
        return tuple(f.spec for f in variants())
    if not name.startswith("_") and (home := modules().get(name)) is not None:
        return getattr(import_module(f".variants.{home}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def variants() -> tuple[VariantFunction, ...]:
    """The public functions of all variants, in the order of the family table."""
    from .matrix_state import core as matrix_state
    from .matrix_state.types import Decay, Erase

    def cell(fn: VariantFunction) -> tuple[bool, int, int]:
        spec = fn.spec
        return spec.core is not matrix_state, list(Erase).index(spec.erase), list(Decay).index(spec.decay)

    return tuple(sorted((__getattr__(name) for name in modules()), key=cell))


def _readouts(spec: VariantSpec) -> str:
    """The read-out; where the option `normalize` chooses it, both alternatives, the default first."""
    names = [spec.readout.name]
    if "normalize" in spec.options and names != ["SOFTMAX"]:
        names.insert(spec.options["normalize"], "LINEAR")
    return ", ".join(names)


def family_table() -> str:
    """The family as a Markdown table, one row per variant."""
    from .elementwise.core import CORE as ELEMENTWISE

    rows = ["| function | arrays | decay | erase | read-out | scale=None | equation | paper |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for c in (f.spec for f in variants()):
        arrays = ", ".join(f"{n}=None" if g.optional else n for n, g in c.arrays.items())
        scale = "K^-1/2" if c.scaled else "1"
        decay, erase, readout = c.decay.name, c.erase.name, _readouts(c)
        if c.core is ELEMENTWISE:  # which has one recurrence
            decay, erase, readout = "elementwise", "-", "-"
        rows.append(
            f"| `{c.name}` | {arrays} | {decay} | {erase} | {readout} | {scale} | "
            f"`{c.equation.replace('|', '/')}` | {c.paper} |"
        )
    return "\n".join(rows) + "\n"
