"""Rows of a token gated and summed (ops/ranks.py) on CuPy arrays, and their transpose; the values are m_r x.

Outputs have the dtype of x, gradients of the core's rows that of these rows (cuda_src/ops/ranks.cu).
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from ...runtime.arrays import Array
from ...runtime.cuda.record import empty
from .arguments import RANKS, address, rows_of
from .row_arrays import dense, is_narrow, kind_of, launched
from .sums import each_over_tokens
from .trapezoid import F32, THREADS, as_dtype, as_rows, lanes_of, lasting

SOURCE, PART = "ops/ranks.cu", 256


def read_out(reads: Any, heads: Any) -> Array:
    """y (..., T, H, V)."""
    given = _given(reads, heads)
    y = lasting(_shape(reads), given["x"].dtype)
    _launch("read_out", reads, given | {"y": y})
    return y


def read_out_vjp(reads: Any, heads: Any, dy: Array) -> tuple[Any, ...]:
    """(du as the core's rows, gradients of z, of the vectors n and o, of the factors of late rows; None: not given)."""
    given = _given(reads, heads)
    *lead, T, H, V = _shape(reads)
    R, z, parts = _rank(reads), given.get("z"), -(-prod((*lead, T)) // PART)
    found: dict[str, Any] = {"du": lasting(given["out"].shape, given["out"].dtype)}
    found["dabove"] = lasting((*lead, T, H, R, R), F32) if R > 1 else None
    found["dz"] = None if z is None else lasting((*lead, T, H, V), z.dtype)
    found["douts"] = empty((parts, H, R, V), F32)
    found["dgates"] = None if z is None or heads.gates is None else empty((parts, H, R, V), F32)
    _launch("read_out_vjp", reads, given | found | {"dy": dense(dy)})
    of_heads = each_over_tokens([found["dgates"], found["douts"]], axes=3)
    return found["du"], found["dz"], *of_heads, found["dabove"]


def _shape(reads: Any) -> tuple[int, ...]:
    *lead, T, _, H, V = reads.x.shape
    return (*lead, T, H, V)


def _rank(reads: Any) -> int:
    return int(reads.m.shape[-2])


def _given(reads: Any, heads: Any) -> dict[str, Array]:
    """The arrays by name; without a gate there are no vectors n."""
    found = {"x": as_rows(reads.x), "out": dense(reads.out), "late": dense(reads.late)}
    found |= {"shares": reads.shares, "m": as_dtype(reads.m, F32), "outs": as_dtype(heads.outs, F32)}
    found |= {} if reads.later is None else {"above": reads.later}
    if heads.z is not None:
        found["z"] = as_rows(heads.z[..., None, :, :])
        found |= {} if heads.gates is None else {"gates": as_dtype(heads.gates, F32)}
    return found


def _launch(entry: str, reads: Any, given: dict[str, Any]) -> None:
    *lead, T, H, V = _shape(reads)
    R, rows = _rank(reads), [given.get(n) for n in ("x", "z", "out", "late", "dy")]
    least = min(y.itemsize for y in rows if y is not None)
    per, lanes = lanes_of(gcd(16 // least, V), V, V, R, *rows, *(given.get(n) for n in ("m", "gates", "outs")))
    x, z, out, _, dy = rows
    constants = {
        "LA_PER": max(per, 2), "LA_APART": int(per == 1), "LA_LANES": lanes, "LA_K": V, "LA_V": V, "LA_R": R,
        "LA_DTYPE": kind_of(x), "LA_GRAD": kind_of(out), "LA_FROM": kind_of(x if dy is None else dy),
        "LA_GATED": int(z is not None), "LA_GATE": kind_of(x if z is None else z),
        "LA_NARROW": int(is_narrow(x, z, out)),
    }  # fmt: skip
    fields: dict[str, Any] = {n: address(given.get(n)) for n in POINTERS}
    fields |= {n: rows_of(None if given.get(n) is None else given[n][..., 0, :, :], H) for n in ("x", "z")}
    tokens = prod((*lead, T))
    packed = RANKS.pack(**fields, tokens=tokens, T=T, H=H)
    launched(SOURCE, entry, constants, -(-tokens // PART) * H, THREADS, packed, *given.values())


POINTERS = [name for name, kind, *_ in RANKS.fields if isinstance(kind, str) and kind.endswith("*")]
