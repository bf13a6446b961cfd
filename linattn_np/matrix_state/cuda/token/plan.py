"""The constants of the kernel of a few tokens (token/step.cu). Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ... import policy
from ...types import Decay, Erase, EraseKey, Inputs, Plan, ReadState, has_raw_gate

STEP = "token/step.cu"


class Stored(NamedTuple):
    """How the arrays of a call are stored."""

    element: str  # of the vectors
    wide: bool  # all rows are read four elements at a time
    one: bool = False  # the kernel of one token
    start: str = "float32"  # of states that are read
    end: str = "float32"  # of states that are written
    many: bool = False  # enough states for blocks of eight warps to fill the device
    out: str | None = None  # of outputs; None: as the vectors
    values: str | None = None  # None: as the vectors


class StepKind(NamedTuple):
    """Properties of a call that its kernel is compiled for."""

    K: int
    V: int
    decay: Decay
    value_decay: bool
    erase: Erase
    separate: bool  # r is not k
    before: bool  # r reads the undecayed state
    read: int  # 0 none, 1 the updated state, 2 the previous one
    bonus: bool
    unit: int = 0  # 1 q and k are divided by their length, 2 and r by that of k
    raw_gate: int = 0  # g is raw: 1 -e^A_log softplus, 2 bounded
    sigmoid: bool = False  # beta is raw
    rotates: bool = False  # pairs of rows of the state
    micro: bool = False  # tokens have micro-steps
    sums: int = 0  # 1 outputs are divided by sums of weights and eps, 2 by the size of these, or what it is at least


def constants_of(x: Inputs, plan: Plan, stored: Stored, sums: int = 0) -> Constants:
    """The constants of step.cu for a call."""
    read = 0 if x.q is None else 1 if plan.query_reads is ReadState.UPDATED else 2
    separate = x.r is not None and not plan.erases_key
    before = x.erase is Erase.DELTA and plan.erase_reads is not ReadState.DECAYED
    unit = 0 if not plan.l2norm else 2 if plan.erase_key is EraseKey.PRODUCT else 1
    raw_gate = 0 if not has_raw_gate(x, plan) else 1 if plan.lower_bound is None else 2
    kind = StepKind(x.k.shape[-1], x.v.shape[-1], x.decay, x.gv is not None, x.erase, separate, before, read,
                    read > 0 and x.u is not None, unit, raw_gate, plan.beta_sigmoid > 0,
                    x.theta is not None, plan.micro_steps > 1, sums)  # fmt: skip
    return step_constants(kind, stored)


@functools.cache
def step_constants(kind: StepKind, stored: Stored) -> Constants:
    """The constants of step.cu from the properties of a call."""
    K, V, element, one = kind.K, kind.V, stored.element, stored.one
    per = 4 if K <= 128 else 2
    rows = stored.many and "float32" not in (stored.start, stored.end) and kind.erase is not Erase.FREE
    split, lanes = _one(K, V, rows) if one else (1, _lanes(kind, stored))
    parts = -(-V // (lanes * per))
    warps = split * max(1, min(policy.TOKEN_WARPS // split, parts)) if one else min(policy.STEP_WARPS, parts)
    narrow = K <= 128 and element != "float32"
    return tuple(
        sorted(
            {
                "LA_DTYPE": ELEMENTS[element],
                "LA_K": K,
                "LA_V": V,
                "LA_PER": per,
                "LA_LANES": lanes,
                "LA_WIDE": int(stored.wide),
                "LA_WARPS": warps,
                "LA_SPLIT": split,
                "LA_ONE": int(one),
                "LA_DECAY": list(Decay).index(kind.decay),
                "LA_BLOCKS": policy.TOKEN_RESIDENT // warps if one and narrow else 1,
                "LA_VALUE_DECAY": int(kind.value_decay),
                "LA_ERASE": list(Erase).index(kind.erase),
                "LA_SEPARATE_ERASE_KEY": int(kind.separate),
                "LA_ERASE_BEFORE": int(kind.before),
                "LA_READ": kind.read,
                "LA_BONUS": int(kind.bonus),
                "LA_UNIT": kind.unit,
                "LA_RAW_GATE": kind.raw_gate,
                "LA_SIGMOID": int(kind.sigmoid),
                "LA_ROTATE": int(kind.rotates),
                "LA_MICRO": int(kind.micro),
                "LA_SUMS": kind.sums,
                "LA_START": ELEMENTS[stored.start],
                "LA_END": ELEMENTS[stored.end],
                "LA_OUT": ELEMENTS[stored.out or element],
                "LA_VALUES": ELEMENTS[stored.values or element],
            }.items()
        )
    )


def _lanes(kind: StepKind, stored: Stored) -> int:
    """Lanes side by side: eight read whole memory sectors; 128 floats per lane must leave registers for the rest."""
    narrow = kind.K <= 128 and stored.element != "float32" and kind.erase is not Erase.FREE
    narrow = narrow and not (kind.bonus or kind.rotates)
    return 8 if stored.wide and kind.V >= 32 and narrow else 4


def _one(K: int, V: int, rows: bool) -> tuple[int, int]:
    """(warps that share the rows, lanes side by side) for one token: 64 floats of state per lane, rows of 256 bytes.

    16-bit states have rows of 128 bytes, or of 256 if `rows` is true.
    """
    lanes = 32 if rows and 64 < K <= 128 <= V else 16 if V >= 64 else 8 if V >= 32 else 4
    groups = 1
    while groups < policy.SUM_CHAINS and 128 // policy.SUM_CHAINS * groups < K:
        groups *= 2
    return max(1, groups * lanes // 32), lanes
