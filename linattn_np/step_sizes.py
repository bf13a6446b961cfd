"""Variants whose values and log decays one step size drives: Mamba-2's change of variables and its transpose.

    dt_t <- clip(dt_t + dt_bias, or softplus of it)
    q = C,  k = B,  v = dt x,  g = dt A,  and out <- (out + D x) silu(z)

On a GPU each line is a kernel (cores/matrix_state/cuda_step_size.py), which rounds v to the dtype of x.
"""

from __future__ import annotations

import math
from typing import Any

from .cores.matrix_state import cuda_step_size
from .cores.matrix_state.inputs import Inputs
from .ground.namespace import Array, cast
from .pieces.gates import clip_vjp, silu, silu_vjp, softplus, softplus_vjp


def _steps(c: Any) -> tuple[Array, Array, Array]:
    """(dt + dt_bias, after softplus, after the clip to dt_limit)."""
    xp, raw = c.xp, cast(c.xp, c.dt, c.dtype)
    if c.dt_bias is not None:
        raw = raw + cast(xp, c.dt_bias, c.dtype)
    soft = softplus(xp, raw) if c.options["dt_softplus"] else raw
    low, high = (float(x) for x in c.options["dt_limit"])
    clipped = xp.clip(soft, low, None if math.isinf(high) else high)
    return raw, soft, clipped


def _on_device(c: Any, *others: Array | None) -> bool:
    """Whether kernels change the variables; others: arrays that they take too. Rotated rows, and so v, are float32."""
    wanted = c.name == "mamba2" and c.options["backend"] in (None, "cuda") and c.dtype == c.xp.float32
    return wanted and cuda_step_size.takes(c.xp, c.x, *others)


def _step(c: Any) -> cuda_step_size.Step:
    low, high = c.options["dt_limit"]
    return cuda_step_size.Step(c.dt, c.dt_bias, c.A, c.options["dt_softplus"], (float(low), float(high)))


def to_core(c: Any) -> Inputs:
    """q = C, k = B, v = dt x, g = dt A."""
    if c.C is not None and c.sizes.Hq > c.sizes.H:
        raise ValueError(f"{c.name}: C has Hq = {c.sizes.Hq} heads and x H = {c.sizes.H}, expected Hq to divide H")
    if _on_device(c):
        v, g = cuda_step_size.values(c.xp, c.x, _step(c))
        return Inputs(c.C, c.B, v, g[..., None])
    xp, (_, _, dt) = c.xp, _steps(c)
    g = dt * cast(xp, c.A, c.dtype)
    return Inputs(c.C, c.B, dt[..., None] * cast(xp, c.x, c.dtype), g[..., None])


def to_core_vjp(c: Any, d: Inputs) -> dict[str, Array]:
    """dt reaches the state by two paths, the value and the decay."""
    if _on_device(c):
        found = cuda_step_size.values_vjp(c.xp, c.x, _step(c), d.v, d.g[..., 0], c.D, getattr(c, "dskipped", None))
        return found | {"B": d.k, "C": d.q}
    xp, (raw, soft, dt) = c.xp, _steps(c)
    dg = d.g[..., 0]
    ddt = xp.sum(d.v * cast(xp, c.x, c.dtype), axis=-1) + dg * cast(xp, c.A, c.dtype)
    ddt = clip_vjp(xp, soft, c.options["dt_limit"], ddt)
    if c.options["dt_softplus"]:
        ddt = softplus_vjp(xp, raw, ddt)
    grads = {"x": dt[..., None] * d.v, "dt": ddt, "A": _over_tokens(xp, dg * dt), "B": d.k, "C": d.q}
    return grads if c.dt_bias is None else grads | {"dt_bias": _over_tokens(xp, ddt)}


def _over_tokens(xp: Any, y: Array, axes: int = 1) -> Array:
    """Sum over batch and tokens: (..., H) -> (H,), (..., H, V) -> (H, V)."""
    return xp.sum(y, axis=tuple(range(y.ndim - axes)))


def _in_one_pass(c: Any, *others: Array) -> bool:
    """Whether a kernel finishes the output."""
    one = (c.D is not None or c.z is not None) and (c.D is None or c.D.ndim == 1)
    return one and _on_device(c, c.z, *others)


def from_core(c: Any, out: Array) -> Array:
    """(out + D x) silu(z)."""
    if c.D is None and c.z is None:
        return out
    if _in_one_pass(c):
        return cuda_step_size.finish(c.xp, out, c.x, c.D, c.z)
    xp = c.xp
    y = _skipped(c, out)
    return y if c.z is None else y * silu(xp, cast(xp, c.z, c.dtype))


def from_core_vjp(c: Any, out: Array, dout: Array) -> tuple[Array, dict[str, Array]]:
    """(gradient of out, those of D, z and the skip's part of x)."""
    if _in_one_pass(c, dout):  # the skip's part follows in to_core_vjp
        dz = {}
        if c.z is not None:
            dout, dz["z"] = cuda_step_size.finish_vjp(c.xp, out, c.x, c.D, c.z, dout)
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
        dD = _over_tokens(xp, dout * x, axes=2)
        grads["D"] = dD if c.D.ndim == 2 else xp.sum(dD, axis=-1)
    return dout, grads


def _skip(c: Any) -> Array:
    D = cast(c.xp, c.D, c.dtype)
    return D if D.ndim == 2 else D[:, None]


def _skipped(c: Any, out: Array) -> Array:
    return out if c.D is None else out + _skip(c) * cast(c.xp, c.x, c.dtype)
