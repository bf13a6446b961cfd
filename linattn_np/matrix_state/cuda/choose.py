"""Which family of kernels computes a call: one table, which calls.py and `explain` use and cuda_src/README.md shows.

A call of a few tokens is one launch of the token kernel, in every cell. A longer one belongs to a cell: the kind of its
decay and of its erase term. The first family of its row that covers the call computes it, else array calls do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import policy
from ..types import Decay, Erase, Inputs, Plan, Saved
from .delta import calls as delta
from .free import calls as free
from .free import delta as free_delta
from .portable import calls as portable
from .portable import delta as portable_delta
from .scan import calls as scan
from .token import calls as token
from .vector import calls as vector
from .vector import delta as vector_delta
from .vector import value as vector_value
from .vector import widths as vector_widths

ELEMENTS = ("bfloat16", "float16", "float32")
NONE_OR_SCALAR, KEYS, VALUES, BOTH = "none, scalar", "key channels", "value channels", "key and value channels"


class FamilyCall(NamedTuple):
    """The inputs and the plan of one call."""

    x: Inputs
    plan: Plan


class Family(NamedTuple):
    """Kernels that compute calls together. calls: the module that covers, computes and differentiates them.

    is_own: for compute capability 90 and bfloat16 alone. follows: takes calls that families before it do not cover.
    """

    calls: Any
    is_own: bool = False
    follows: bool = False

    def takes(self, capability: int, element: str) -> bool:
        """Whether the family has kernels for a device and an element type."""
        return not self.is_own or (capability == 90 and element == "bfloat16" and not policy.PORTABLE)


class Cell(NamedTuple):
    """A row of the table: the axes that decay, the erase term."""

    decay: str
    erase: str


FAMILIES = {
    "token": Family(token, follows=True),
    "scan": Family(scan),
    "delta": Family(delta, is_own=True),
    "vector": Family(vector, is_own=True),
    "vector/delta": Family(vector_delta, is_own=True),
    "vector/widths": Family(vector_widths, is_own=True),
    "vector/value": Family(vector_value, is_own=True),
    "free": Family(free, is_own=True),
    "free/delta": Family(free_delta, is_own=True),
    "portable": Family(portable, follows=True),
    "portable/delta": Family(portable_delta, follows=True),
}
CELLS = {
    Cell(NONE_OR_SCALAR, "none"): ("scan",),
    Cell(NONE_OR_SCALAR, "delta"): ("delta", "portable/delta"),
    Cell(NONE_OR_SCALAR, "delta, r is not k"): ("portable/delta",),
    Cell(KEYS, "none"): ("vector", "vector/widths", "portable", "token"),
    Cell(KEYS, "delta"): ("vector/delta", "vector/widths", "portable", "token"),
    Cell(KEYS, "delta, r is not k"): ("free/delta", "token"),
    Cell(VALUES, "none"): ("vector/value", "token"),
    Cell(BOTH, "none"): ("token",),
    Cell("none, key channels", "free"): ("free", "token"),
    Cell("scalar", "free"): ("token",),
}
TOKEN = FAMILIES["token"]


def cell_of(x: Inputs, plan: Plan) -> Cell:
    """The cell of a call."""
    if x.erase is Erase.FREE:
        return Cell("scalar" if x.decay is Decay.SCALAR else "none, key channels", "free")
    keys = x.decay is Decay.VECTOR
    if x.erase is Erase.DELTA:
        return Cell(KEYS if keys else NONE_OR_SCALAR, "delta" if plan.erases_key else "delta, r is not k")
    return Cell(BOTH if keys and x.gv is not None else KEYS if keys else VALUES if x.gv is not None else NONE_OR_SCALAR,
                "none")  # fmt: skip


def first(cell: Cell, capability: int, element: str) -> str:
    """The family of a cell on a device, where its shapes and options are covered."""
    return next(name for name in CELLS[cell] if FAMILIES[name].takes(capability, element))


def family_of(x: Inputs, plan: Plan) -> Family:
    """The family that computes a call; where none does, the one whose `unsupported_reason` says why."""
    if policy.is_short_cuda(plan):
        return TOKEN
    row = [FAMILIES[name] for name in CELLS[cell_of(x, plan)]]
    covering = (family for family in row if family.calls.unsupported_reason(FamilyCall(x, plan)) is None)
    return next(covering, [family for family in row if not family.follows or family is row[0]][-1])


def family_of_gradients(saved: Saved) -> Family:
    """The family that computes the gradients of a call; the token family has array calls for what no kernel covers.

    A few tokens are one chunk, and a backward by chunks needs no residuals of it.
    """
    row = [FAMILIES[name] for name in CELLS[cell_of(saved.x, saved.plan)]]
    chunks = [family for family in row if family is not TOKEN]
    return next((one for one in chunks if one.calls.unsupported_gradients(saved) is None), TOKEN)
