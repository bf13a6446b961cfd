"""Which family of kernels computes a call: one table, which calls.py and `explain` use and cuda_src/README.md shows.

A family is a module: `unsupported_reason(x, plan)`, `unsupported_gradients(x, plan)`, `how(x, plan)`,
`handles(x, plan)`, `forward` and `backward`. A call of a few tokens is one launch of the token kernel, in every cell.
A longer one belongs to a cell: the kind of its decay and of its erase term. The first family of its row that covers the
call computes it, else array calls do.
"""

from __future__ import annotations

from typing import Any

from .. import policy
from ..types import Decay, Erase, Inputs, Plan
from .delta import calls as delta
from .free import calls as free
from .free import delta as free_delta
from .portable import calls as portable
from .portable import columns as portable_columns
from .portable import delta as portable_delta
from .scan import calls as scan
from .token import calls as token
from .vector import calls as vector
from .vector import delta as vector_delta
from .vector import value as vector_value
from .vector import widths as vector_widths

ELEMENTS = ("bfloat16", "float16", "float32")
NONE_OR_SCALAR, KEYS, VALUES, BOTH = "none, scalar", "key channels", "value channels", "key and value channels"
Family = Any  # one of these modules

OWN = {  # for compute capability 90 and bfloat16 alone
    "delta": delta,
    "vector": vector,
    "vector/delta": vector_delta,
    "vector/widths": vector_widths,
    "vector/value": vector_value,
    "free": free,
    "free/delta": free_delta,
}
FAMILIES = OWN | {"token": token, "scan": scan, "portable": portable, "portable/columns": portable_columns,
                  "portable/delta": portable_delta}  # fmt: skip
ROUNDING = {vector, vector_value}  # whose kernels round all rows to the dtype of the keys
CELLS = {  # (axes that decay, erase term): the names of families
    (NONE_OR_SCALAR, "none"): ("scan",),
    (NONE_OR_SCALAR, "delta"): ("delta", "portable/delta"),
    (NONE_OR_SCALAR, "delta, r is not k"): ("portable/delta",),
    (KEYS, "none"): ("vector", "vector/widths", "portable", "token"),
    (KEYS, "delta"): ("vector/delta", "vector/widths", "portable", "token"),
    (KEYS, "delta, r is not k"): ("free/delta", "token"),
    (VALUES, "none"): ("vector/value", "token"),
    (BOTH, "none"): ("portable/columns", "token"),
    ("none, key channels", "free"): ("free", "token"),
    ("scalar", "free"): ("token",),
}


def cell_of(x: Inputs, plan: Plan) -> tuple[str, str]:
    """The cell of a call."""
    if x.erase is Erase.FREE:
        return "scalar" if x.decay is Decay.SCALAR else "none, key channels", "free"
    keys = x.decay is Decay.VECTOR
    if x.erase is Erase.DELTA:
        return KEYS if keys else NONE_OR_SCALAR, "delta" if plan.erases_key else "delta, r is not k"
    return (
        BOTH if keys and x.gv is not None else KEYS if keys else VALUES if x.gv is not None else NONE_OR_SCALAR,
        "none",
    )


def first(cell: tuple[str, str], capability: int, element: str) -> str:
    """The family of a cell on a device, where its shapes and options are covered."""
    own = capability == 90 and element == "bfloat16" and not policy.PORTABLE
    return next(name for name in CELLS[cell] if own or name not in OWN)


def family_of(x: Inputs, plan: Plan) -> Family:
    """The family that computes a call; where none does, the one whose `unsupported_reason` says why."""
    if policy.is_short_cuda(plan):
        return token
    row = CELLS[cell_of(x, plan)]
    covering = (FAMILIES[name] for name in row if FAMILIES[name].unsupported_reason(x, plan) is None)
    return next(covering, FAMILIES[[name for name in row if name in OWN or name is row[0]][-1]])


def family_of_gradients(x: Inputs, plan: Plan) -> Family:
    """The family that computes the gradients of a call; the token family has array calls for what no kernel covers.

    A few tokens are one chunk, and a backward by chunks needs no residuals of it.
    """
    chunks = (FAMILIES[name] for name in CELLS[cell_of(x, plan)] if name != "token")
    return next((one for one in chunks if one.unsupported_gradients(x, plan) is None), token)
