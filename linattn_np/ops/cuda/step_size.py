"""Mamba-2's step size on CuPy arrays: values and log decays, skip connection and output gate, and their gradients.

    dt <- clip(dt + bias, or softplus of it);  v = dt x;  g = dt A;  out <- (out + D x) silu(z)

Each is one pass over the rows (cuda_src/ops/step_size.cu). v is rounded to the dtype of x, as the products of
16-bit queries and keys would round it.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

from ...runtime.arrays import Array, cast, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS, Constants
from .arguments import STEP_SIZE, address, rows_of
from .sums import each_over_tokens
from .unit_rows import LANE_NUMBERS, MOST_ROWS, THREADS, misaligned, row_constants

SOURCE = "ops/step_size.cu"
ARRAYS = ("D", "other", "dout", "dg", "y", "dx", "dz", "g", "ddt", "dA", "dD")


class StepInputs(NamedTuple):
    """Inputs of the step size: dt (..., T, H); bias and A (H,); whether softplus is applied; the limits."""

    dt: Array
    bias: Array | None
    A: Array
    soft: bool
    limits: tuple[float, float]


def takes(xp: Any, x: Array, *others: Array | None) -> bool:
    """Whether the kernel supports these values, and the other arrays of their shape and dtype."""
    if not xp.__name__.endswith("cupy") or dtype_name(x) not in ELEMENTS:
        return False
    small = 0 < prod(x.shape[:-1]) < MOST_ROWS and 0 < x.shape[-1] <= 32 * LANE_NUMBERS
    return small and all(y is None or y.dtype == x.dtype for y in others) and launch.unusable() is None


def step_constants(element: str, grad: str, V: int) -> Constants:
    """Constants for rows read in pieces of 16 bytes, or as many as V allows; grad: the dtype of the other array."""
    return row_constants(element, grad, V, gcd(16 // (4 if element == "float32" else 2), V))


def values(xp: Any, x: Array, step: StepInputs) -> tuple[Array, Array]:
    """(v in the dtype of x, g (..., T, H) in float32)."""
    x, step = _rows(xp, x), _dense(xp, step)
    v, g = xp.empty(x.shape, dtype=x.dtype), xp.empty(x.shape[:-1], dtype=xp.float32)
    _launch("step_size", x, step, results={"y": v, "g": g})
    return v, g


def values_vjp(
    xp: Any, x: Array, step: StepInputs, dv: Array, dg: Array, D: Array | None = None, dout: Array | None = None
) -> dict[str, Array]:
    """Gradients of x (in its dtype), dt, A and bias (float32) from dv and dg; g is (..., T, H).

    dout: the gradient of out + D x, in the dtype of x, for dx and dD.
    """
    x, step, D, f32 = _rows(xp, x), _dense(xp, step), _parameter(xp, D), xp.float32
    dv = xp.ascontiguousarray(dv if dtype_name(dv) in ELEMENTS else cast(xp, dv, f32))
    dg, dout = xp.ascontiguousarray(cast(xp, dg, f32)), None if dout is None else xp.ascontiguousarray(dout)
    results = {"dx": xp.empty(x.shape, dtype=x.dtype)}
    results |= {n: xp.empty(x.shape[:-1], dtype=f32) for n in ("ddt", "dA", *(() if dout is None else ("dD",)))}
    _launch("step_size_vjp", x, step, D=D, other=dv, dout=dout, dg=dg, results=results)
    terms = {"A": results["dA"]} | ({} if step.bias is None else {"dt_bias": results["ddt"]})
    terms |= {} if dout is None else {"D": results["dD"]}
    sums = dict(zip(terms, each_over_tokens([*terms.values()]), strict=True))
    return {"x": results["dx"], "dt": results["ddt"]} | sums


def finish(xp: Any, out: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """(out + D x) silu(z), in the dtype of x; D (H,), or (..., T, H)."""
    x, z = _rows(xp, x), None if z is None else _rows(xp, z)
    y = xp.empty(x.shape, dtype=x.dtype)
    _launch("finish", x, D=_parameter(xp, D), z=z, other=xp.ascontiguousarray(out), results={"y": y})
    return y


def finish_vjp(xp: Any, out: Array, x: Array, D: Array | None, z: Array, dout: Array) -> tuple[Array, Array]:
    """Gradients of out + D x and of z, in the dtype of x, which dout has too."""
    x, results = _rows(xp, x), {n: xp.empty(x.shape, dtype=x.dtype) for n in ("y", "dz")}
    _launch(
        "finish_vjp",
        x,
        D=_parameter(xp, D),
        z=_rows(xp, z),
        other=xp.ascontiguousarray(out),
        dout=xp.ascontiguousarray(dout),
        results=results,
    )
    return results["y"], results["dz"]


def _rows(xp: Any, x: Array) -> Array:
    """x, or a copy of it, in the layout of the kernels: contiguous rows, one batch axis."""
    fine = x.ndim <= 4 and (x.shape[-1] == 1 or x.strides[-1] == x.itemsize)
    return x if fine else xp.ascontiguousarray(x)


def _dense(xp: Any, step: StepInputs) -> StepInputs:
    dt = step.dt if dtype_name(step.dt) in ELEMENTS else cast(xp, step.dt, xp.float32)
    return step._replace(dt=xp.ascontiguousarray(dt), bias=_parameter(xp, step.bias), A=_parameter(xp, step.A))


def _parameter(xp: Any, y: Array | None) -> Array | None:
    return None if y is None else xp.ascontiguousarray(cast(xp, y, xp.float32))


def _launch(
    entry: str, x: Array, step: StepInputs | None = None, *, results: dict[str, Array], **given: Array | None
) -> None:
    """given, results: input and output arrays of STEP_SIZE by name; rows are contiguous, except the rows of z."""
    given |= results
    soft, limits = (False, (0.0, 0.0)) if step is None else (step.soft, step.limits)
    dt, bias, A = (None, None, None) if step is None else (step.dt, step.bias, step.A)
    T, heads, V = x.shape[-3:]
    z, other = given.get("z"), given.get("other")
    per, by_rows = gcd(16 // x.itemsize, V), (x, *(given.get(n) for n in ("z", "other", "dout", "y", "dx", "dz")))
    while per > 1 and any(misaligned(y, per * y.itemsize) for y in by_rows if y is not None):
        per //= 2
    constants = row_constants(dtype_name(x), dtype_name(x if other is None else other), V, per)
    arrays = {"dt": dt, "bias": bias, "A": A, **{n: given.get(n) for n in ARRAYS}}
    rows = prod(x.shape[:-1])
    packed = STEP_SIZE.pack(
        x=rows_of(x), z=rows_of(z), **{n: address(y) for n, y in arrays.items()}, rows=rows, T=T, heads=heads,
        dt_kind=0 if dt is None else ELEMENTS[dtype_name(dt)], soft=int(soft), low=float(limits[0]),
        high=float(limits[1]), D_by_rows=int(arrays["D"] is not None and arrays["D"].ndim > 1))  # fmt: skip
    blocks = -(-rows // (THREADS // dict(constants)["LA_LANES"]))
    launch.launch(
        SOURCE,
        entry,
        constants,
        blocks,
        THREADS,
        0,
        packed,
        tuple(y for y in (x, z, *arrays.values()) if y is not None),
    )
