"""Variants whose values and log decays depend on one step size: Mamba-2's change of variables and its transpose.

    dt_t <- clip(dt_t + dt_bias, or softplus of it)
    q = C,  k = B,  v = dt x,  g = dt A,  and out <- (out + D x) silu(z)

On CuPy arrays in float32 each line is a kernel (ops/cuda/step_size.py), which rounds v to the dtype of x.
"""

from __future__ import annotations

from typing import Any

from ...matrix_state.types import Inputs
from ...ops.gates import clip, clip_vjp, silu, silu_vjp, softplus, softplus_vjp
from ...runtime.arrays import Array, cast, is_cupy, over_tokens
from ...spec import Variables


def _steps(c: Variables) -> tuple[Array, Array, Array]:
    """(dt + dt_bias, after softplus, after the clip to dt_limit)."""
    xp, raw = c.xp, cast(c.xp, c.dt, c.dtype)
    if c.dt_bias is not None:
        raw = raw + cast(xp, c.dt_bias, c.dtype)
    soft = softplus(xp, raw) if c.options["dt_softplus"] else raw
    low, high = (float(x) for x in c.options["dt_limit"])
    return raw, soft, clip(xp, soft, (low, high))


def _kernels(c: Variables, *others: Array | None) -> Any:
    """The kernels for the change of variables, or None; others: arrays that they must support too.

    Rotated rows, and so v, have the compute dtype.
    """
    if not (c.kernels and c.name == "mamba2" and is_cupy(c.xp) and c.dtype == c.xp.float32):
        return None
    from ...ops.cuda import step_size

    return step_size if step_size.takes(c.xp, c.x, *others) else None


def _step(c: Variables, kernels: Any) -> Any:
    low, high = c.options["dt_limit"]
    return kernels.StepInputs(c.dt, c.dt_bias, c.A, c.options["dt_softplus"], (float(low), float(high)))


def to_core(c: Variables) -> Inputs:
    """q = C, k = B, v = dt x, g = dt A."""
    if (kernels := _kernels(c)) is not None:
        v, g = kernels.values(c.xp, c.x, _step(c, kernels))
        return Inputs(c.C, c.B, v, g[..., None])
    xp, (_, _, dt) = c.xp, _steps(c)
    g = dt * cast(xp, c.A, c.dtype)
    return Inputs(c.C, c.B, dt[..., None] * cast(xp, c.x, c.dtype), g[..., None])


def to_core_vjp(c: Variables, d: Inputs) -> dict[str, Array]:
    """dt reaches the state by two paths, the value and the decay."""
    if (kernels := _kernels(c)) is not None:
        skipped = getattr(c, "dskipped", None)
        grads = kernels.values_vjp(c.xp, c.x, _step(c, kernels), d.v, d.g[..., 0], c.D, skipped)
        return grads | {"B": d.k, "C": d.q}
    xp, (raw, soft, dt) = c.xp, _steps(c)
    dg = d.g[..., 0]
    ddt = xp.sum(d.v * cast(xp, c.x, c.dtype), axis=-1) + dg * cast(xp, c.A, c.dtype)
    ddt = clip_vjp(xp, soft, c.options["dt_limit"], ddt)
    if c.options["dt_softplus"]:
        ddt = softplus_vjp(xp, raw, ddt)
    grads = {"x": dt[..., None] * d.v, "dt": ddt, "A": over_tokens(xp, dg * dt), "B": d.k, "C": d.q}
    return grads if c.dt_bias is None else grads | {"dt_bias": over_tokens(xp, ddt)}


def _finishing(c: Variables, *others: Array) -> Any:
    """The kernels for from_core, or None."""
    one = (c.D is not None or c.z is not None) and (c.D is None or c.D.ndim == 1)
    return _kernels(c, c.z, *others) if one else None


def from_core(c: Variables, out: Array) -> Array:
    """(out + D x) silu(z)."""
    if c.D is None and c.z is None:
        return out
    if (kernels := _finishing(c)) is not None:
        return kernels.finish(c.xp, out, c.x, c.D, c.z)
    xp = c.xp
    y = _skipped(c, out)
    return y if c.z is None else y * silu(xp, cast(xp, c.z, c.dtype))


def from_core_vjp(c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, gradients of D, z and the skip's part of x)."""
    if (kernels := _finishing(c, dout)) is not None:  # to_core_vjp adds the skip's part of dx
        dz = {}
        if c.z is not None:
            dout, dz["z"] = kernels.finish_vjp(c.xp, out, c.x, c.D, c.z, dout)
        return dout, dz if c.D is None else dz | {"dskipped": dout}
    xp, grads = c.xp, {}
    if c.D is not None or c.z is not None:
        dout = cast(xp, dout, c.dtype)
    if c.z is not None:
        z = cast(xp, c.z, c.dtype)
        grads["z"] = silu_vjp(xp, z, dout * _skipped(c, out))
        dout = dout * silu(xp, z)
    if c.D is not None:
        x = cast(xp, c.x, c.dtype)
        grads["x"] = dout * _skip(c)
        dD = over_tokens(xp, dout * x, axes=2)
        grads["D"] = dD if c.D.ndim == 2 else xp.sum(dD, axis=-1)
    return dout, grads


def _skip(c: Variables) -> Array:
    D = cast(c.xp, c.D, c.dtype)
    return D if D.ndim == 2 else D[:, None]


def _skipped(c: Variables, out: Array) -> Array:
    return out if c.D is None else out + _skip(c) * cast(c.xp, c.x, c.dtype)
