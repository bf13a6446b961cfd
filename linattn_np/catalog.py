"""The list of variants. A new one is one file in variants/ and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .card import Card
from .variants.comba import comba
from .variants.delta_rule import delta_rule
from .variants.dplr import dplr
from .variants.gated_delta_rule import gated_delta_rule
from .variants.gla import gla
from .variants.iplr import iplr
from .variants.kda import kda
from .variants.lightning_attention import lightning_attention
from .variants.linear_attention import linear_attention
from .variants.mamba2 import mamba2
from .variants.retention import retention
from .variants.rwkv6 import rwkv6
from .variants.rwkv7 import rwkv7
from .variants.simple_gla import simple_gla

VARIANTS: tuple[Callable[..., Any], ...] = (
    linear_attention,
    retention,
    lightning_attention,
    simple_gla,
    mamba2,
    gla,
    rwkv6,
    delta_rule,
    gated_delta_rule,
    comba,
    kda,
    rwkv7,
    dplr,
    iplr,
)

CARDS: tuple[Card, ...] = tuple(f.card for f in VARIANTS)  # type: ignore[attr-defined]


def family_table() -> str:
    """The family as a Markdown table, a row a variant."""
    rows = ["| function | arrays | decay | erase | scale=None | equation | paper |", "|---|---|---|---|---|---|---|"]
    for c in CARDS:
        arrays = ", ".join(f"{n}=None" if g.optional else n for n, g in c.arrays.items())
        scale = "K^-1/2" if c.scaled else "1"
        rows.append(f"| `{c.name}` | {arrays} | {c.decay.name} | {c.erase.name} | {scale} | "
                    f"`{c.equation.replace('|', '/')}` | {c.paper} |")
    return "\n".join(rows) + "\n"
