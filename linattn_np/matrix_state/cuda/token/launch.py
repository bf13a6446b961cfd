"""Launches of the kernel of a few tokens (token/step.cu).

It allocates only with `empty` and names the arrays of its launch, so that calls can be replayed
(runtime/cuda/record.py).
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda.elements import ELEMENTS
from ....runtime.cuda.launch import Kernel
from ... import policy
from ...types import WITHOUT_GATES, Inputs, Plan
from .. import arguments
from ..operands import element_of
from .plan import STEP, Stored, constants_of

RESULTS = ("out", "start", "end", "start_slots", "end_slots", "fresh", "offsets")
NAMES_OF_POINTERS = (*WITHOUT_GATES, *RESULTS, "A_log", "bias", "theta", "z", "z_end", "w", "least")
AT = tuple(f"at_{n}" for n in (*WITHOUT_GATES, "w", "least"))
STRIDES = tuple(f"{which}_{n}" for which in ("start", "end") for n in ("slot", "head", "row"))


class Sums(NamedTuple):
    """Sums of weights that outputs are divided by; float32.

    Outputs are divided by sum + eps, or by max(|sum|, least).
    """

    w: Array | None  # (..., T, H, 1)  weights of the tokens; None: 1
    least: Array | None  # (..., T, H, 1)
    eps: float
    z: Array | None  # (..., H, K)  before the call; None: zeros


def launched(
    x: Inputs, plan: Plan, state: Array | None, sums: Sums | None = None, to: Array | None = None
) -> tuple[Array | None, Array, Array | None]:
    """(out, final state, final sums of weights) of one launch; to: where the final states (slots, H, K, V) go."""
    xp, lead, (T, H, V) = plan.xp, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    K, element = x.k.shape[-1], element_of(x._replace(v=None))
    arrays = _arrays(xp, x._replace(r=None) if plan.erases_key else x, element)  # r is read once, as k
    ragged = bool(plan.sequences) and plan.sequences[0].row is not None
    N = len(plan.sequences) if ragged else prod(lead)
    offsets = xp.asarray([0, *(s.stop for s in plan.sequences)], dtype=xp.int64) if ragged else None
    heads = H if x.q is None else max(H, x.q.shape[-2])
    out = None if x.q is None else xp.empty((*lead, T // plan.micro_steps, heads, V), dtype=arrays["v"].dtype)
    shape = (N, H, K, V) if ragged else (*lead, H, K, V)
    start, whole = states(xp, state, K, V)
    if to is not None:
        end, last = to, to
    elif plan.overwrite and whole:
        end, last = state, start
    else:
        end = xp.empty(shape, dtype=xp.float32)
        last = end if end.ndim == 4 else end.reshape(N, H, K, V)
    slots, fresh = (None, None) if plan.pool_rows is None else plan.pool_rows[:2]
    gates = tuple(
        None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32)) for y in (x.A_log, x.bias, x.theta)
    )
    w, least, _, z = sums or Sums(None, None, 0.0, None)
    z_end = None if sums is None else z if plan.overwrite and z is not None else xp.empty(
        (*lead, H, K), dtype=xp.float32)  # fmt: skip
    pointers = (*arrays.values(), out, start, last, slots, slots if last is start else None, fresh, offsets, *gates,
                z, z_end, w, least)  # fmt: skip
    wide = _wide(arrays, (start, last))
    one = T == 1 and not ragged and wide and heads == H and _near((*arrays.values(), out), (start, last))
    many = N * H >= policy.WHOLE_ROW_STATES
    kinds = _kind(start), _kind(last), many, None if out is None else dtype_name(out), dtype_name(arrays["v"])
    how = 0 if sums is None else 1 if least is None else 2
    constants = constants_of(x, plan, Stored(element, wide, one, *kinds), how)
    values = dict(constants)
    parts = -(-V // (values["LA_LANES"] * values["LA_PER"] * (values["LA_WARPS"] // values["LA_SPLIT"])))
    fields = dict(zip(NAMES_OF_POINTERS, [0 if y is None else y.data.ptr for y in pointers], strict=True))
    vectors = arrays | {"w": w, "least": least}
    fields.update(zip(AT, [_vectors_of(y, heads if n == "q" else H) for n, y in vectors.items()], strict=True))
    fields.update(zip(STRIDES, (*_strides_of(start), *_strides_of(last)), strict=True))
    fields |= {
        "at_out": _vectors_of(out, heads), "places": N if slots is None or start is None else start.shape[0],
        "T": T, "heads": H, "readers": heads // H, "slot_bytes": 0 if slots is None else slots.itemsize,
        "heads_inverse": _inverse(H), "read": plan.scale, "past": 4 * N * H * K * V <= policy.L1_BYPASS_BYTES,
        "pairs": 0 if x.theta is None else x.theta.shape[0],
        "steps": plan.micro_steps, "eps": 0.0 if sums is None else sums.eps, "root": plan.l2norm_eps**0.5,
        "bound": plan.lower_bound or 0.0, "strongest": plan.beta_sigmoid,
    }  # fmt: skip
    kernel = Kernel(STEP, "step", 32 * values["LA_WARPS"], constants)
    kernel.launch(N * H * parts, arguments.STEP.packed(fields), pointers)
    return out, end, z_end


def _arrays(xp: Any, x: Inputs, element: str) -> dict[str, Any]:
    """Every array as (B, T, heads, width), (T, heads, width) or (heads, width), with contiguous rows.

    Vectors but the values have the dtype `element`.
    """
    arrays: dict[str, Any] = {}
    for name, y in zip(WITHOUT_GATES, x, strict=False):
        if y is not None:
            gate = name in ("v", "g", "gv", "beta", "u")
            if (dtype_name(y) not in ELEMENTS) if gate else (dtype_name(y) != element):
                y = cast(xp, y, xp.float32)
            if y.shape[-1] > 1 and y.strides[-1] != y.itemsize:
                y = xp.ascontiguousarray(y)
            if y.ndim > 4:
                y = y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
        arrays[name] = y
    return arrays


def states(xp: Any, state: Array | None, K: int, V: int) -> tuple[Array | None, bool]:
    """(a state as (slots, H, K, V) with contiguous rows, whether it is the caller's memory)."""
    if state is None:
        return None, False
    S = state if dtype_name(state) in ELEMENTS else cast(xp, state, xp.float32)
    S = S if V == 1 or S.strides[-1] == S.itemsize else xp.ascontiguousarray(S)
    S = S if S.ndim == 4 else S.reshape(prod(S.shape[:-3]), *S.shape[-3:])
    return S, S.data.ptr == state.data.ptr


def _kind(S: Array | None) -> str:
    """The element type of stored states."""
    return "float32" if S is None else dtype_name(S)


def _wide(arrays: dict[str, Any], states: tuple[Array | None, ...]) -> bool:
    """Whether every row of every array can be read four elements at a time."""
    for y in arrays.values():
        if y is not None and y.shape[-1] > 1 and not _by_fours(y):
            return False
    fours = arrays["k"].shape[-1] % 4 == arrays["v"].shape[-1] % 4 == 0
    return fours and all(S is None or _by_fours(S) for S in states)


def _by_fours(y: Array) -> bool:
    unit = 4 * y.itemsize
    return not (y.data.ptr % unit or any(s % unit for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1))


def _near(arrays: tuple[Array | None, ...], states: tuple[Array | None, ...]) -> bool:
    """Whether the kernel of one token can address the arrays: strides of 32 bits, dense rows of states."""
    if any(S is not None and S.shape[-2] > 1 and S.strides[-2] != S.itemsize * S.shape[-1] for S in states):
        return False
    return all(abs(n) < 1 << 31 for y in (*arrays, *states) if y is not None for n in y.strides)


def _vectors_of(y: Array | None, heads: int) -> tuple[int, ...]:
    """The VECTORS struct: strides in bytes over batch, tokens and heads, the heads that share one, the element."""
    if y is None:
        return 0, 0, 0, 0, 0
    strides = (0, 0, *y.strides)[-4:-1] if y.ndim < 4 else y.strides[:-1] if y.ndim == 4 else _merged(y)
    return *strides, _inverse(heads // y.shape[-2]), ELEMENTS[dtype_name(y)]


def _inverse(d: int) -> int:
    """The multiplier by which the kernel divides by d: ceil(2^32 / d), 0 for d = 1."""
    return -(-(1 << 32) // d) % (1 << 32)


def _merged(out: Array) -> tuple[int, int, int]:
    """Strides of a contiguous array with its batch axes merged into one."""
    return (prod(out.shape[-3:]) * out.itemsize, *out.strides[-3:-1])


def _strides_of(S: Array | None) -> tuple[int, ...]:
    """Strides in elements over slots, heads and rows."""
    return (0, 0, 0) if S is None else tuple([s // S.itemsize for s in S.strides[:3]])
