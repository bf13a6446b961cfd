"""A few tokens as one CUDA kernel on CuPy arrays: the recurrence, for every cell of the room (cuda_src/.../step.cu).

It allocates with `empty` alone and names the arrays of its launch, so that a call can be made again (cuda/repeat.py).
"""

from __future__ import annotations

import functools
import struct
from math import prod
from typing import Any

from ...cuda import launch
from ...ground.namespace import Array, cast, dtype_name
from ..kinds import Decay, Erase, Row
from . import recurrence
from .cuda_plan import ELEMENTS, WIDEST, Constants
from .inputs import Inputs, Plan, Saved

STEP = "matrix_state/step.cu"
WARPS = 2  # of a block, each with columns of its own
ONE_WARPS, RESIDENT = 4, 16  # of a block of the kernel of one token, and of a multiprocessor
MANY = 256  # states in 16 bits from which on a block of the kernel of one token has whole rows of 256 bytes
LEAVES = 8  # chains that a sum down the rows is added from (tile/columns.cuh)
FAR = 128 << 20  # bytes of states up to which they pass the L1 cache by: measured on a card with 60 MB of L2
FEW = 16  # tokens of the longest sequence up to which the recurrence is taken unasked
VECTORS = Inputs._fields  # the first pointers of the struct Arguments, in its order
NAMES_OF_POINTERS = (*VECTORS, "out", "start", "end", "start_slots", "end_slots", "offsets")
POINTERS = struct.Struct(f"<{len(NAMES_OF_POINTERS)}Q")


def takes(plan: Plan) -> bool:
    """Whether a call is walked token by token: asked for by chunk_size=1, or few tokens where the form is left open."""
    if plan.chunk_size is None:
        return max((s.stop - s.start for s in plan.sequences), default=0) <= FEW
    return plan.chunk_size == 1


def refuses(call: Any) -> str | None:
    """Why the kernel does not cover a call that is walked token by token; None where it does."""
    x, plan = call.x, call.plan
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the definition in CuPy"
    K, V = x.k.shape[-1], x.v.shape[-1]
    if max(K, V) > WIDEST:
        return f"keys are {K} and values {V} wide, the kernels hold up to {WIDEST}"
    if 0 in (*x.v.shape, *x.k.shape) or (x.q is not None and 0 in x.q.shape):
        return "there is nothing to compute"
    if any(y is not None and y.shape[-2] > x.v.shape[-2] for n, y in x._asdict().items() if n != "q"):
        return "there are more heads of keys or gates than of values"
    if max(x.v.shape[-2], 0 if x.q is None else x.q.shape[-2]) >= 1 << 16:
        return "there are 65536 heads or more"
    if x.v.device.id != launch.current_device():
        return f"the arrays are on device {x.v.device.id}, the current one is {launch.current_device()}"
    return launch.unusable()


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array | None, Array, Saved]:
    """(out, final state, saved); the final state is `state` itself where the plan lets it be overwritten, else float32.

    A state stored in 16 bits is read so, and written so where it is overwritten: its one rounding.
    """
    xp, lead, (T, H, V) = plan.xp, tuple(x.v.shape[:-3]), x.v.shape[-3:]
    K, element = x.k.shape[-1], element_of(x)
    arrays = _arrays(xp, x, element)
    ragged = bool(plan.sequences) and plan.sequences[0].row is not None
    N = len(plan.sequences) if ragged else prod(lead)
    offsets = xp.asarray([0, *(s.stop for s in plan.sequences)], dtype=xp.int64) if ragged else None
    heads = H if x.q is None else max(H, x.q.shape[-2])
    out = None if x.q is None else xp.empty((*lead, T, heads, V), dtype=arrays["v"].dtype)
    shape = (N, H, K, V) if ragged else (*lead, H, K, V)
    start, whole = _states(xp, state, K, V)
    if plan.overwrite and whole:
        end, last = state, start
    else:
        end = xp.empty(shape, dtype=xp.float32)
        last = end.reshape(N, H, K, V)
    slots = plan.rows
    pointers = (*arrays.values(), out, start, last, slots, slots if last is start else None, offsets)
    wide = _wide(arrays, (start, last))
    one = T == 1 and not ragged and wide and heads == H and _near((*arrays.values(), out), (start, last))
    constants = constants_of(x, plan, element, wide, one, _kind(start), _kind(last), N * H >= MANY)
    values = dict(constants)
    parts = -(-V // (values["LA_LANES"] * values["LA_PER"] * (values["LA_WARPS"] // values["LA_SPLIT"])))
    arguments = b"".join([
        POINTERS.pack(*(0 if y is None else y.data.ptr for y in pointers)),
        *(_pack(y, heads if n == "q" else H) for n, y in arrays.items()),
        _pack(out, heads), _pack_state(start), _pack_state(last),
        struct.pack("<q4iIfi4x", N if slots is None or start is None else start.shape[0], T, H, heads // H,
                    0 if slots is None else slots.itemsize, _inverse(H), plan.scale, 4 * N * H * K * V <= FAR),
    ])
    launch.launch(STEP, "step", constants, N * H * parts, 32 * values["LA_WARPS"], 0, arguments, pointers)
    return None if out is None else cast(xp, out, x.v.dtype), end, Saved(x, plan, state, None)


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state, by the recurrence's adjoint."""
    return recurrence.backward(saved, dout, dstate)


def element_of(x: Inputs) -> str:
    """The element that the kernel takes its vectors in: bfloat16 or float16 if all are, else float32."""
    names = {dtype_name(y) for y in (x.q, x.k, x.v, x.r, x.a, x.b) if y is not None}
    return names.pop() if len(names) == 1 and names <= set(ELEMENTS) else "float32"


def constants_of(
    x: Inputs, plan: Plan, element: str, wide: bool, one: bool = False, start: str = "float32", end: str = "float32",
    many: bool = False,
) -> Constants:
    """The constants of step.cu for a call. one: by the kernel of one token. start, end: what states are stored in.

    many: so many states that blocks of eight warps fill the card.
    """
    read = 0 if x.q is None else 1 if plan.query_row is Row.AFTER else 2
    own = x.r is not None and x.r is not x.k
    before = x.erase is Erase.DELTA and plan.erase_row is not Row.DECAYED
    return step_constants(element, x.k.shape[-1], x.v.shape[-1], wide, x.decay, x.gv is not None, x.erase, own, before,
                          read, read > 0 and x.u is not None, one, start, end, many)


@functools.cache
def step_constants(
    element: str, K: int, V: int, wide: bool, decay: Decay, value_decay: bool, erase: Erase, own: bool, before: bool,
    read: int, bonus: bool, one: bool = False, start: str = "float32", end: str = "float32", many: bool = False,
) -> Constants:
    """The same from words. own: r is not k; before: r reads the undecayed state; read: 0 none, 1 AFTER, 2 BEFORE."""
    per = 4 if K <= 128 else 2
    rows = many and "float32" not in (start, end) and erase is not Erase.FREE
    split, lanes = _one(K, V, rows) if one else (1, _lanes(element, K, V, wide, erase, bonus))
    parts = -(-V // (lanes * per))
    warps = split * max(1, min(ONE_WARPS // split, parts)) if one else min(WARPS, parts)
    room = K <= 128 and element != "float32"
    return tuple(sorted({
        "LA_DTYPE": ELEMENTS[element], "LA_K": K, "LA_V": V, "LA_PER": per, "LA_LANES": lanes, "LA_WIDE": int(wide),
        "LA_WARPS": warps, "LA_SPLIT": split, "LA_ONE": int(one), "LA_DECAY": list(Decay).index(decay),
        "LA_BLOCKS": RESIDENT // warps if one and room else 1,
        "LA_VALUE_DECAY": int(value_decay), "LA_ERASE": list(Erase).index(erase), "LA_OWN": int(own),
        "LA_ERASE_BEFORE": int(before), "LA_READ": read, "LA_BONUS": int(bonus),
        "LA_START": ELEMENTS[start], "LA_END": ELEMENTS[end],
    }.items()))


def _lanes(element: str, K: int, V: int, wide: bool, erase: Erase, bonus: bool) -> int:
    """Lanes side by side: eight read whole pieces of memory; 128 floats a lane must leave room for the rest."""
    room = K <= 128 and element != "float32" and erase is not Erase.FREE and not bonus
    return 8 if wide and V >= 32 and room else 4


def _one(K: int, V: int, rows: bool) -> tuple[int, int]:
    """(warps that share the rows, lanes side by side) for one token: 64 floats of state a lane, rows of 256 bytes.

    Rows of 128 in 16 bits, and of 256 then too only if `rows` are wanted so.
    """
    lanes = 32 if rows and 64 < K <= 128 <= V else 16 if V >= 64 else 8 if V >= 32 else 4
    groups = 1
    while groups < LEAVES and 128 // LEAVES * groups < K:
        groups *= 2
    return max(1, groups * lanes // 32), lanes


def _arrays(xp: Any, x: Inputs, element: str) -> dict[str, Any]:
    """Every array as (B, T, heads, width), (T, heads, width) or (heads, width), rows contiguous, in a kind to read."""
    found: dict[str, Any] = {}
    for name, y in x._asdict().items():
        if name == "r" and y is x.k:  # read once, as k
            y = None
        if y is not None:
            gate = name in ("g", "gv", "beta", "u")
            if (dtype_name(y) not in ELEMENTS) if gate else (dtype_name(y) != element):
                y = cast(xp, y, xp.float32)
            if y.shape[-1] > 1 and y.strides[-1] != y.itemsize:
                y = xp.ascontiguousarray(y)
            if y.ndim > 4:
                y = y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
        found[name] = y
    return found


def _states(xp: Any, state: Array | None, K: int, V: int) -> tuple[Array | None, bool]:
    """(a state as (places, H, K, V) with contiguous rows, whether it is the caller's own memory)."""
    if state is None:
        return None, False
    S = state if dtype_name(state) in ELEMENTS else cast(xp, state, xp.float32)
    S = S if V == 1 or S.strides[-1] == S.itemsize else xp.ascontiguousarray(S)
    S = S if S.ndim == 4 else S.reshape(prod(S.shape[:-3]), *S.shape[-3:])
    return S, S.data.ptr == state.data.ptr


def _kind(S: Array | None) -> str:
    """What states are stored in."""
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
    """Whether the kernel of one token can find its way: strides of 32 bits, dense rows of states."""
    if any(S is not None and S.shape[-2] > 1 and S.strides[-2] != S.itemsize * S.shape[-1] for S in states):
        return False
    return all(abs(n) < 1 << 31 for y in (*arrays, *states) if y is not None for n in y.strides)


def _pack(y: Array | None, heads: int) -> bytes:
    """Strides in bytes over batch, tokens and heads, the heads that share one, the kind."""
    if y is None:
        return struct.pack("<3qIi", 0, 0, 0, 0, 0)
    strides = (0, 0, *y.strides)[-4:-1] if y.ndim < 4 else y.strides[:-1] if y.ndim == 4 else _merged(y)
    return struct.pack("<3qIi", *strides, _inverse(heads // y.shape[-2]), ELEMENTS[dtype_name(y)])


def _inverse(d: int) -> int:
    """What the kernel divides by d with: ceil(2^32 / d), 0 for 1."""
    return -(-(1 << 32) // d) % (1 << 32)


def _merged(out: Array) -> tuple[int, int, int]:
    """Strides of a contiguous array with several batch axes, seen as with one."""
    return (prod(out.shape[-3:]) * out.itemsize, *out.strides[-3:-1])


def _pack_state(S: Array | None) -> bytes:
    """Strides in elements over slots, heads and rows."""
    return struct.pack("<3q", *((0, 0, 0) if S is None else (s // S.itemsize for s in S.strides[:3])))

