"""Rotated rows that are written twice (ops/trapezoid.py) on CuPy arrays, and their transpose.

Of tokens with several rows the kernels make the values themselves: x has one row, m its vectors (ops/ranks.py). Each
query's factors of the rows behind it are those of the rows as the core reads them.

q, k and v have the dtype of the rows given, numbers and ends are float32 (cuda_src/ops/trapezoid.cu). Angles are sums
over parts of PART tokens, then of parts, in float64: those of a token do not depend on later ones.
"""

from __future__ import annotations

from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS
from ...runtime.cuda.record import empty
from .arguments import TRAPEZOID, address, rows_of
from .formulas import compiled
from .row_arrays import MOST_ROWS, dense, is_aligned, kind_of, launched, working_dtype
from .stabiliser import offsets_of
from .sums import over_tokens

SOURCE = "ops/trapezoid.cu"
PART, THREADS, WIDEST = 32, 256, 256
RANKS, HELD = 8, 1024  # rows of a token, and numbers of them that a warp holds in registers, at most
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
lasting = partial(empty, is_counted=False)  # arrays that live about as long as the call, or are its results


def takes(xp: Any, x: Any, dtype: Any) -> bool:
    """Whether the kernels compute a call."""
    *lead, T, rows, H, V = x.x.shape
    R, K = x.B.shape[-3], x.B.shape[-1]
    fits = 0 < prod((*lead, T, R, H)) < MOST_ROWS and 0 < V <= WIDEST and 0 < K <= WIDEST
    fits = fits and rows == 1 and (R == 1 or (R <= RANKS and R * max(K, V) <= HELD and x.m is not None))
    usual = all(y is None or dtype_name(y) in ELEMENTS for y in x)
    return fits and usual and dtype == F32 and launch.unusable() is None


class Sizes(NamedTuple):
    lead: tuple[int, ...]  # batch axes of tokens
    owners: tuple[int, ...]  # those of states
    T: int
    H: int
    K: int
    V: int
    P: int
    R: int
    parts: int  # of a sequence, if all have as many tokens
    slots: int  # for parts of all sequences

    @property
    def states(self) -> int:
        return prod(self.owners)

    def tokens(self, *own: int, dtype: Any = F32) -> Array:
        """A new array (..., T, H, *own)."""
        return lasting((*self.lead, self.T, self.H, *own), np.dtype(dtype))

    def rows(self, *own: int, dtype: Any = F32) -> Array:
        """A new array (..., T R, H, *own) of the core's rows."""
        return lasting((*self.lead, self.T * self.R, self.H, *own), np.dtype(dtype))

    def ends(self, *own: int) -> Array:
        """A new array of states (..., H, *own)."""
        return empty((*self.owners, self.H, *own), F32)


class Pass(NamedTuple):
    """A call: its arrays by name, and numbers of TRAPEZOID."""

    sizes: Sizes
    arrays: dict[str, Array]
    numbers: dict[str, Any]

    def run(self, entry: str, blocks: int, **outputs: Array | None) -> None:
        """Launch an entry with arrays that it writes, or reads beside those of the call."""
        given = self.arrays | {n: y for n, y in outputs.items() if y is not None}
        s, by_rows = self.sizes, [given.get(n) for n in ("x", "B", "C")]
        kind, grads = self.numbers["kind"], [given.get(n) for n in ("dq", "dk", "dv", "dout")]
        per = gcd(16 // by_rows[0].itemsize, s.K, s.V) if by_rows[0] is not None else 1
        per, lanes = lanes_of(per, s.K, s.V, s.R, *by_rows, *grads, given.get("m"))
        constants = {
            "LA_PER": max(per, 2), "LA_APART": int(per == 1), "LA_LANES": lanes, "LA_K": s.K, "LA_V": s.V,
            "LA_P": s.P, "LA_R": s.R, "LA_SPREAD": int("m" in given),
            "LA_DTYPE": kind, "LA_GRAD": kind if grads[1] is None else kind_of(grads[1]),
            "LA_KEYS": kind if given.get("dB") is None else kind_of(given["dB"]),
            "LA_ANGLE": kind_of(given["angle"]) if "angle" in given else 2,
        }  # fmt: skip
        fields: dict[str, Any] = {n: address(given.get(n)) for n in POINTERS}
        each = [None if y is None else y[..., 0, :, :] for y in by_rows]
        fields |= {n: rows_of(y, s.H) for n, y in zip(("x", "B", "C"), each, strict=True)}
        fields |= {f"{n}_row": 0 if y is None else y.strides[-3] for n, y in zip("BC", by_rows[1:], strict=True)}
        more = {n: y for n, y in self.numbers.items() if n != "kind"}
        packed = TRAPEZOID.pack(**fields, **more, T=s.T, states=s.states, parts=s.parts, H=s.H)
        launched(SOURCE, entry, constants, blocks, THREADS, packed, *given.values())

    def add_angles(self, after: bool = False) -> None:
        """The sums of half turns before each part; after: of gradients, from those of the parts."""
        s = self.sizes
        if "sums" not in self.arrays:
            return
        if not after:
            self.run("angle_sums", s.slots * -(-s.H * s.P // THREADS))
        self.run("after_parts" if after else "before_parts", -(-s.states * s.H * s.P // THREADS))

    @property
    def blocks(self) -> int:
        return self.sizes.slots * self.sizes.H


def lanes_of(per: int, K: int, V: int, R: int, *arrays: Array | None) -> tuple[int, int]:
    """(numbers that a lane moves together, 1: apart, lanes of a row) of tokens of R rows; of several, few numbers."""
    while per > 1 and not is_aligned(per, *arrays):
        per //= 2
    while per > 2 and R > 2 and 16 * per >= max(K, V):
        per //= 2
    lanes = 1
    while lanes < 32 and lanes * max(per, 2) < max(K, V):
        lanes *= 2
    return per, lanes


POINTERS = [name for name, kind, *_ in TRAPEZOID.fields if isinstance(kind, str) and kind.endswith("*")]


def pass_of(xp: Any, x: Any, last: Any, D: Array | None, scale: float, sequences: Any) -> Pass:
    """The call of tokens x, the last keys and values before them, a skip connection D (H,); None: there are none."""
    *lead, T, _, H, V = x.x.shape
    R = x.B.shape[-3]
    offsets = offsets_of(xp, sequences)
    owners = tuple(lead) if offsets is None else (len(sequences),)
    longest = max(s.stop - s.start for s in sequences)
    parts = max(-(-longest // PART), 1)
    parts, slots = (parts, prod(owners) * parts) if offsets is None else (0, T // PART + len(sequences))
    sizes = Sizes(tuple(lead), owners, T, H, x.B.shape[-1], V, x.angle.shape[-1], R, parts, slots)
    given = {n: y for n, y in (("x", x.x), ("B", x.B), ("C", x.C)) if y is not None}
    names = {dtype_name(y) for y in given.values()}
    given = {n: as_rows(y if len(names) == 1 else as_dtype(y, F32)) for n, y in given.items()}
    kind = kind_of(given["x"])
    numbers = {"dt": x.dt, "trap": x.trap, "A": x.A, "D": D, "m": x.m}
    numbers |= {} if last is None else {"past_k": last.k, "past_v": last.v}
    given |= {n: as_dtype(y, F32) for n, y in numbers.items() if y is not None}
    given |= {} if offsets is None else {"offsets": offsets}
    if sizes.P:
        given["angle"] = dense(x.angle)
        if longest > PART:
            given["sums"] = empty((slots, H, sizes.P), F64)
    return Pass(sizes, given, {"rates": int(x.A.ndim > 1), "scale": float(scale), "kind": kind})


def as_rows(y: Array) -> Array:
    """y (..., T, R, heads, width), or a copy of it, with contiguous rows and one batch axis."""
    fine = y.ndim <= 5 and (y.shape[-1] == 1 or y.strides[-1] == y.itemsize)
    return y if fine else dense(y).reshape(prod(y.shape[:-4]), *y.shape[-4:])


def as_dtype(y: Array, dtype: Any) -> Array:
    """y in C order in `dtype`."""
    return dense(y) if y.dtype == dtype else compiled("copy", (y,), (tuple(y.shape), dtype), working_dtype(y))


def late_writes(xp: Any, x: Any, last: Any, D: Array | None, scale: float, sequences: Any) -> tuple[Any, ...]:
    """As ops/trapezoid.py: q, k, v, g, shares, later, and of the last token keys, values, own and rotation."""
    how = pass_of(xp, x, last, D, scale, sequences)
    s, dtype, reads = how.sizes, how.arrays["x"].dtype, x.C is not None
    how.add_angles()
    q, k, v = (s.rows(n, dtype=dtype) for n in (s.K, s.K, s.V))
    g, shares, own = s.rows(), s.tokens(s.R, s.R) if reads else None, s.ends(1)
    above = s.tokens(s.R, s.R) if reads and s.R > 1 else None
    ends, rotation = (s.ends(s.R, s.K), s.ends(s.R, s.V)), empty((2, *s.owners, s.H, s.P), F32)
    how.run("late_rows", how.blocks, q=q if reads else None, k=k, v=v, g=g, shares=shares, above=above,
            end_k=ends[0], end_v=ends[1], end_own=own, end_rotation=rotation)  # fmt: skip
    return q if reads else None, k, v, g, shares, above, *ends, own, rotation


def late_writes_vjp(
    xp: Any, x: Any, last: Any, D: Array | None, scale: float, sequences: Any, d: Any, dout: Array | None, ends: Any,
    late: Any = None, dlater: Array | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Gradients by name from those of q, k, v, g and outputs; ends: of the last tokens, or None.

    late: the forward's, and dlater the gradient of its factors of rows, if R > 1
    """
    how = pass_of(xp, x, last, D, scale, sequences)
    s, dtype, rows = how.sizes, how.arrays["x"].dtype, {"dk": d.k, "dv": d.v}
    rows |= {} if x.C is None else {"dq": d.q, "dout": dout}
    narrow = all(y.dtype == dtype for y in rows.values())
    given = {n: as_dtype(y, dtype if narrow else F32) for n, y in rows.items()}
    given["dg"] = as_dtype(d.g, F32)
    if s.R > 1 and late is not None and x.C is not None:
        given |= {"q": late.q, "k": late.k, "above": late.later, "dabove": dlater}
    if ends is not None:
        given |= {f"dend_{n}": as_dtype(y, F64 if n == "theta" else F32) for n, y in ends._asdict().items()}
    shared = {n for n in ("B", "C") if n in how.arrays and how.arrays[n].shape[-2] < s.H}
    keys, dx = F32 if shared else dtype, s.tokens(s.V, dtype=dtype)
    found = {"dx": dx} | {f"d{n}": s.rows(s.K, dtype=keys) for n in ("B", "C") if n in how.arrays}
    if "m" in how.arrays:
        found["dm"] = empty((s.slots, s.H, s.R, s.V), F32)
    found |= {n: s.tokens() for n in ("dw", "down", *(() if x.C is None else ("written",)))}
    if last is not None:
        found |= {"dpast_k": s.ends(s.R, s.K), "dpast_v": s.ends(s.R, s.V)}
    later = s.tokens(s.P) if s.P else None
    how.add_angles()
    how.run("late_rows_vjp", how.blocks, **given, **found, later=later)
    how.add_angles(after=True)
    of_numbers = {n: s.tokens() for n in ("ddt", "dtrap", "dA")}
    of_numbers["dangle"] = s.tokens(s.P, dtype=x.angle.dtype) if s.P else None
    how.run("angle_sums_vjp", how.blocks, dg=given["dg"], dw=found.pop("dw"), down=found.pop("down"), later=later,
            **of_numbers)  # fmt: skip
    ranks = {n: y.reshape((*s.lead, s.T, s.R, s.H, s.K)) for n, y in found.items() if n in ("dB", "dC")}
    ranks |= {"dm": over_tokens(found["dm"], axes=3)} if "dm" in found else {}
    return found | ranks | {"dx": dx[..., None, :, :]} | of_numbers


def settles(P: Array, last: Any) -> bool:
    """Whether the kernel computes `settled`."""
    return last.k.shape[-2] <= RANKS and P.dtype == F32 and launch.unusable() is None


def settled(P: Array, last: Any, own: Array, rotation: Array, in_place: bool) -> Array:
    """S from P (..., H, K, V) rotated back by `rotation`, + own k^T v of rows (..., H, R, width)."""
    *owners, H, K, V = P.shape
    in_place = in_place and P.flags.c_contiguous
    pairs, S = rotation.shape[-1], P if in_place else lasting(P.shape, F32)
    sizes = Sizes((), tuple(owners), 0, H, K, V, pairs, last.k.shape[-2], 1, 1)
    given = {"late": P, "end_k": last.k, "end_v": last.v, "end_own": own, "end_rotation": rotation}
    given = {n: as_dtype(y, F32) for n, y in given.items()} | {"S": S}
    blocks = -(-prod(owners) * H * (K - pairs) * V // THREADS)
    Pass(sizes, given, {"rates": 0, "scale": 0.0, "kind": 2}).run("settle", blocks)
    return S
