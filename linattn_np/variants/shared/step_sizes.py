"""Variants whose values and log decays depend on one step size: Mamba-2's change of variables and its transpose.

    dt_t <- clip(dt_t + dt_bias, or softplus of it)
    q = C,  k = B,  v = dt x,  g = dt A,  and out <- (out + D x) silu(z)

On CuPy arrays in float32 each line is one kernel (ops/cuda/step_size.py), which rounds v to the dtype of x.
"""

from __future__ import annotations

import math
from typing import Any

from ...call.options import Options
from ...matrix_state.types import Inputs
from ...ops.product import product
from ...ops.step_size import gate_vjp, skip_and_gate, step_size, step_size_vjp
from ...ops.sums import inner, over_tokens, sum_to
from ...runtime.arrays import Array, cast, is_cupy
from ...runtime.values import is_real, shown
from ...spec import Call


class StepOptions(Options, total=False):
    """The common options, and the functions of dt."""

    dt_softplus: bool
    dt_limit: tuple[float, float]


def check_options(fn: str, options: dict[str, Any]) -> None:
    limit = options["dt_limit"]
    pair = isinstance(limit, tuple | list) and len(limit) == 2 and all(map(is_real, limit))
    if not (pair and limit[0] <= limit[1]):
        raise ValueError(f"{fn}: dt_limit is {shown(limit)}, expected (low, high) with low <= high")


STEP_OPTIONS: dict[str, Any] = {"dt_softplus": False, "dt_limit": (0.0, math.inf)}


def steps(c: Call) -> Array:
    """dt after its formula."""
    return step_size(c.xp, c.dt, c.dt_bias, c.options["dt_softplus"], limits(c), c.dtype)


def limits(c: Call) -> tuple[float, float]:
    low, high = c.options["dt_limit"]
    return float(low), float(high)


def row_kernels(c: Call, *others: Array | None) -> Any:
    """The kernels for rows of x, or None; others: arrays that they must support too."""
    if not (c.kernels and is_cupy(c.xp) and c.dtype == c.xp.float32):
        return None
    from ...ops.cuda import step_size

    return step_size if step_size.takes(c.xp, c.x, *others) else None


def _step(c: Call, kernels: Any) -> Any:
    return kernels.StepInputs(c.dt, c.dt_bias, c.A, c.options["dt_softplus"], limits(c))


def to_core(c: Call) -> Inputs:
    """q = C, k = B, v = dt x, g = dt A."""
    if (kernels := row_kernels(c)) is not None:
        v, g = kernels.values(c.xp, c.x, _step(c, kernels))
        return Inputs(c.C, c.B, v, g[..., None])
    xp, dt = c.xp, steps(c)
    v, g = product(xp, dt[..., None], c.x, dtype=c.dtype), product(xp, dt, c.A, dtype=c.dtype)
    return Inputs(c.C, c.B, v, g[..., None])


def to_core_vjp(c: Call, d: Inputs) -> dict[str, Array]:
    """dt reaches the state by two paths, the value and the decay."""
    if (kernels := row_kernels(c)) is not None:
        skipped = getattr(c, "dskipped", None)
        grads = kernels.values_vjp(c.xp, c.x, _step(c, kernels), d.v, d.g[..., 0], c.D, skipped)
        return grads | {"B": d.k, "C": d.q}
    xp, dt, dg = c.xp, steps(c), d.g[..., 0]
    ddt = inner(xp, d.v, c.x, dg, c.A, c.dtype)
    ddt = step_size_vjp(xp, c.dt, c.dt_bias, c.options["dt_softplus"], limits(c), ddt)
    grads = {"x": product(xp, dt[..., None], d.v, dtype=c.dtype), "dt": ddt, "B": d.k, "C": d.q}
    grads["A"] = over_tokens(xp, product(xp, dg, dt, dtype=c.dtype))
    return grads if c.dt_bias is None else grads | {"dt_bias": over_tokens(xp, ddt)}


def _finishing(c: Call, *others: Array) -> Any:
    """The kernels for from_core, or None."""
    one = (c.D is not None or c.z is not None) and (c.D is None or c.D.ndim == 1)
    return row_kernels(c, c.z, *others) if one else None


def from_core(c: Call, out: Array) -> Array:
    """(out + D x) silu(z)."""
    if c.D is None and c.z is None:
        return out
    if (kernels := _finishing(c)) is not None:
        return kernels.finish(c.xp, out, c.x, c.D, c.z)
    return skip_and_gate(c.xp, out, skip(c), c.x, c.z, c.dtype)


def from_core_vjp(c: Call, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of D, z and the skip's part of x)."""
    if (kernels := _finishing(c, dout)) is not None:  # to_core_vjp adds the skip's part of dx
        dz = {}
        if c.z is not None:
            dout, dz["z"] = kernels.finish_vjp(c.xp, out, c.x, c.D, c.z, dout)
        return dout, dz if c.D is None else dz | {"dskipped": dout}
    xp, D, grads = c.xp, skip(c), dict[str, Array]()
    if c.z is not None:
        grads["z"] = gate_vjp(xp, skip_and_gate(xp, out, D, c.x, None, c.dtype), c.z, dout, c.dtype)
        dout = skip_and_gate(xp, dout, None, None, c.z, c.dtype)
    if D is not None:
        dout = cast(xp, dout, c.dtype)
        grads["x"] = product(xp, dout, D, dtype=c.dtype)
        dD = over_tokens(xp, product(xp, dout, c.x, dtype=c.dtype), axes=2)
        grads["D"] = dD if c.D.ndim == 2 else sum_to(xp, dD, (dD.shape[0], 1))[:, 0]
    return dout, grads


def skip(c: Call) -> Array | None:
    """D as (H, 1) or (H, V)."""
    return c.D if c.D is None or c.D.ndim == 2 else c.D[:, None]
