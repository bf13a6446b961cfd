"""The list of variants. A new one is one file in variants/ and one import line here; all else follows from its card.

The package exports every public name of this module.
"""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from .card import Card as Card
from .cores.kinds import Decay as _Decay
from .cores.kinds import Erase as _Erase
from .variants.based import based as based
from .variants.comba import comba as comba
from .variants.delta_product import delta_product as delta_product
from .variants.delta_rule import delta_rule as delta_rule
from .variants.dfw import dfw as dfw
from .variants.dplr import dplr as dplr
from .variants.dplr import rwkv7 as rwkv7
from .variants.gated_delta_rule import gated_delta_rule as gated_delta_rule
from .variants.gla import gla as gla
from .variants.gsa import abc as abc
from .variants.gsa import gsa as gsa
from .variants.hgrn2 import hgrn2 as hgrn2
from .variants.iplr import iplr as iplr
from .variants.kda import kda as kda
from .variants.lightning_attention import lightning_attention as lightning_attention
from .variants.linear_attention import linear_attention as linear_attention
from .variants.longhorn import longhorn as longhorn
from .variants.mamba2 import mamba2 as mamba2
from .variants.mamba2 import transxssm as transxssm
from .variants.mesa_net import mesa_net as mesa_net
from .variants.mlstm import mlstm as mlstm
from .variants.performer import performer as performer
from .variants.rebased import rebased as rebased
from .variants.retention import retention as retention
from .variants.retention import retnet as retnet
from .variants.rfa import rfa as rfa
from .variants.rwkv6 import rwkv6 as rwkv6
from .variants.simple_gla import simple_gla as simple_gla


def _cell(fn: _Callable[..., _Any]) -> tuple[int, int]:
    card: Card = fn.card  # type: ignore[attr-defined]
    return list(_Erase).index(card.erase), list(_Decay).index(card.decay)


VARIANTS: tuple[_Callable[..., _Any], ...] = tuple(
    sorted((f for f in list(globals().values()) if isinstance(getattr(f, "card", None), Card)), key=_cell)
)
CARDS: tuple[Card, ...] = tuple(f.card for f in VARIANTS)  # type: ignore[attr-defined]


def _readouts(card: Card) -> str:
    """What is made of q S: with `normalize`, what it chooses between, the default first."""
    names = [card.readout.name]
    if "normalize" in card.options:
        names.insert(card.options["normalize"], "LINEAR")
    return ", ".join(names)


def family_table() -> str:
    """The family as a Markdown table, a row a variant."""
    rows = ["| function | arrays | decay | erase | read-out | scale=None | equation | paper |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for c in CARDS:
        arrays = ", ".join(f"{n}=None" if g.optional else n for n, g in c.arrays.items())
        scale = "K^-1/2" if c.scaled else "1"
        rows.append(f"| `{c.name}` | {arrays} | {c.decay.name} | {c.erase.name} | {_readouts(c)} | {scale} | "
                    f"`{c.equation.replace('|', '/')}` | {c.paper} |")
    return "\n".join(rows) + "\n"
