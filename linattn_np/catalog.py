"""The list of variants. A new variant is one file in variants/ and one line here; the rest follows from its spec.

Modules are imported on first use: `catalog.gla` imports variants/no_erase/gla.py, VARIANTS and SPECS import all.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import VariantFunction, VariantSpec

MODULES = {  # function -> module in variants/
    "based": "no_erase.based",
    "comba": "delta.comba",
    "delta_product": "delta.delta_product",
    "delta_rule": "delta.delta_rule",
    "dfw": "no_erase.dfw",
    "dplr": "free.dplr",
    "rwkv7": "free.dplr",
    "gated_delta_rule": "delta.gated_delta_rule",
    "gla": "no_erase.gla",
    "abc": "no_erase.gsa",
    "gsa": "no_erase.gsa",
    "hgrn2": "no_erase.hgrn2",
    "iplr": "free.iplr",
    "kda": "delta.kda",
    "lightning_attention": "no_erase.lightning_attention",
    "linear_attention": "no_erase.linear_attention",
    "longhorn": "delta.longhorn",
    "mamba2": "no_erase.mamba2",
    "transxssm": "no_erase.mamba2",
    "mesa_net": "no_erase.mesa_net",
    "mlstm": "no_erase.mlstm",
    "performer": "no_erase.performer",
    "rebased": "no_erase.rebased",
    "retention": "no_erase.retention",
    "retnet": "no_erase.retention",
    "rfa": "no_erase.rfa",
    "rwkv6": "no_erase.rwkv6",
    "simple_gla": "no_erase.simple_gla",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(import_module(f".variants.{MODULES[name]}", __package__), name)
    if name == "VARIANTS":
        return variants()
    if name == "SPECS":
        return tuple(f.spec for f in variants())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def variants() -> tuple[VariantFunction, ...]:
    """The public functions of all variants, in the order of the family table."""
    from .matrix_state.types import Decay, Erase

    def cell(fn: VariantFunction) -> tuple[int, int]:
        return list(Erase).index(fn.spec.erase), list(Decay).index(fn.spec.decay)

    return tuple(sorted((__getattr__(name) for name in MODULES), key=cell))


def _readouts(spec: VariantSpec) -> str:
    """The read-out; with the option `normalize`, both alternatives, the default first."""
    names = [spec.readout.name]
    if "normalize" in spec.options.defaults:
        names.insert(spec.options.defaults["normalize"], "LINEAR")
    return ", ".join(names)


def family_table() -> str:
    """The family as a Markdown table, one row per variant."""
    rows = ["| function | arrays | decay | erase | read-out | scale=None | equation | paper |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for c in (f.spec for f in variants()):
        arrays = ", ".join(f"{n}=None" if g.optional else n for n, g in c.arrays.items())
        scale = "K^-1/2" if c.scaled else "1"
        rows.append(f"| `{c.name}` | {arrays} | {c.decay.name} | {c.erase.name} | {_readouts(c)} | {scale} | "
                    f"`{c.equation.replace('|', '/')}` | {c.paper} |")
    return "\n".join(rows) + "\n"
