"""`linattn docstring NAME`: the docstring that follows from a variant's spec, to start from."""

from __future__ import annotations

import argparse
import sys

from . import catalog
from .matrix_state.types import Decay, Erase, ReadState
from .spec import ArgSpec, VariantSpec


def docstring(spec: VariantSpec) -> str:
    """Sentence, equation, one line per array, scale, options, results, errors, core, paper."""
    width = max(map(len, spec.arrays)) + 2
    shapes = {name: " or ".join(map(_shape, arg.axes.split("|"))) for name, arg in spec.arrays.items()}
    columns = max(map(len, shapes.values())) + 3
    scale = "K**-0.5" if spec.scaled else "1"
    lines = [spec.sentence, "", *(f"    {line.strip()}" for line in spec.equation.split(";")), "",
             *(f"{name:{width}}{shapes[name]:{columns}}{_words(arg)}" for name, arg in spec.arrays.items()), "",
             *(f"{option}: TODO." for option in options_of(spec)),
             f"scale=None means {scale}. Returns {_returns(spec)}.",
             "Raises ValueError or TypeError for shapes, dtypes and options that do not fit.",
             f"Core: {core_of(spec)}. Common options: linattn_np.Options.",
             *([f"{spec.paper}."] if spec.paper else [])]  # fmt: skip
    return "\n".join(lines)


def options_of(spec: VariantSpec) -> list[str]:
    """A variant's own options with their defaults: "name=default"."""
    return [f"{option}={value!r}" for option, value in spec.options.items()]


def _shape(axes: str) -> str:
    """ "T H K" as (..., T, H, K), "H" as (H,)."""
    letters = axes.split()
    letters = ["...", *letters] if letters[0] == "T" else letters
    return f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"


def _words(arg: ArgSpec) -> str:
    return arg.description + "; optional" * (arg.optional and "None" not in arg.description)


def _returns(spec: VariantSpec) -> str:
    heads = "max(Hq, H)" if spec.change.query is not None and spec.shares_states else "H"
    row = ", ".join(("T", heads, "V") if spec.row_axes == 2 else spec.arrays[spec.change.value].axes.split())
    one = (spec.state.axes or spec.core.STATE_AXES).get("state", "H K V")
    state = _shape(f"... {one}") if spec.state.parts is None else f"a {spec.state.parts.__name__}"
    return f"out (..., {row}), and the state {state} if return_state"


def core_of(spec: VariantSpec) -> str:
    """The core by its folder, and the cell of the matrix-state core."""
    name = getattr(spec.core, "__name__", type(spec.core).__module__).split(".")[1]
    return f"{name}, {cell(spec)}" if name == "matrix_state" else name


def cell(spec: VariantSpec) -> str:
    """The kind of decay and of erase, and which states are read if not the usual ones."""
    words = [f"decay {spec.decay.name}", f"erase {spec.erase.name}"]
    if spec.erase is Erase.DELTA and spec.erase_reads is ReadState.PREVIOUS and spec.decay is not Decay.NONE:
        words.append("r reads the PREVIOUS state")
    if spec.query_reads is ReadState.PREVIOUS:
        words.append("q reads the PREVIOUS state")
    return ", ".join(words)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=sorted(catalog.modules()), metavar="NAME", help="a variant")


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(docstring(getattr(catalog, args.name).spec) + "\n")
    return 0
