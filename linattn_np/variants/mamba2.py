"""Mamba-2: the state space dual form, a scalar decay driven by the step size dt; TransXSSM: with rotated B and C."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any, Unpack

from ..call import public
from ..card import Card, Given
from ..cores.kinds import Decay
from ..cores.matrix_state import cuda_step_size
from ..cores.matrix_state.inputs import Inputs
from ..ground.namespace import Array, cast
from ..options import Options
from ..pieces.gates import clip_vjp, silu, silu_vjp, softplus, softplus_vjp
from ..rotated import THETA, Rotated


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


def check_options(fn: str, options: dict[str, Any]) -> None:
    limit = options["dt_limit"]
    pair = isinstance(limit, tuple | list) and len(limit) == 2 and all(isinstance(x, Real) for x in limit)
    if not (pair and limit[0] <= limit[1]):
        raise ValueError(f"{fn}: dt_limit is {limit!r}, expected (low, high) with low <= high")


class Mamba2Options(Options, total=False):
    """The common options, and what dt goes through."""

    dt_softplus: bool
    dt_limit: tuple[float, float]


CARD = Card(
    name="mamba2",
    sentence="State space dual form: a scalar decay and a value scale driven by one step size.",
    equation="S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t x_t);  out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Dao, Gu, Transformers are SSMs, arXiv 2405.21060",
    arrays={
        "x": Given("T H V", "normal", "inputs (the values)"),
        "dt": Given("T H", "positive", "step sizes"),
        "A": Given("H", "negative", "decay rate of the head, < 0 (-exp(A_log))"),
        "B": Given("T Hk K", "unit", "input vectors (the keys), shared by groups of heads"),
        "C": Given("T Hq K", "normal", "output vectors (the queries), shared by groups of heads"),
        "D": Given("H|H V", "normal", "skip connection", optional=True),
        "z": Given("T H V", "normal", "gate: out times silu(z)", optional=True),
        "dt_bias": Given("H", "normal", "added to dt", optional=True),
    },
    to_core=to_core,
    to_core_vjp=to_core_vjp,
    decay=Decay.SCALAR,
    scaled=False,
    query="C",
    key="B",
    value="x",
    options={"dt_softplus": False, "dt_limit": (0.0, math.inf)},
    check_options=check_options,
    from_core=from_core,
    from_core_vjp=from_core_vjp,
    examples=({"dt_softplus": True}, {"dt_softplus": True, "dt_limit": (0.3, 1.0)}),
)


@public(CARD)
def mamba2(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    **options: Unpack[Mamba2Options],
) -> Any:
    """Mamba-2 (SSD): a scalar decay and a value scale driven by one step size.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t x_t)
        out_t = (scale C_t S_t + D x_t) silu(z_t)

    x        (..., T, H, V)     inputs (the values)
    dt       (..., T, H)        step sizes
    A        (H,)               decay rate of the head, < 0 (-exp(A_log))
    B        (..., T, Hk, K)    input vectors (the keys); Hk groups of heads share one
    C        (..., T, Hq, K)    output vectors (the queries); Hq groups of heads share one; None: write only
    D        (H,) or (H, V)     skip connection
    z        (..., T, H, V)     gate: out times silu(z)
    dt_bias  (H,)               added to dt

    dt_softplus=False, dt_limit=(0, inf): the clip that dt goes through.
    scale=None means 1. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state; mamba_ssm keeps
    the transpose (..., H, V, K). Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.options.Options.
    Dao, Gu, Transformers are SSMs, arXiv 2405.21060.
    """


TRANSXSSM = replace(
    CARD,
    name="transxssm",
    sentence="Mamba-2 whose input and output vectors rotate with their position.",
    equation="S_t = e^{dt_t A} R S_{t-1} + B_t^T (dt_t x_t), R rotates pairs of rows by theta;  "
             "out_t = (C_t S_t + D x_t) silu(z_t)",
    paper="Wu, Shen et al., TransXSSM, arXiv 2506.09507; Dao, Gu, arXiv 2405.21060",
    arrays={**CARD.arrays, "theta": THETA},
    **Rotated(to_core, to_core_vjp).card_parts(),
)


@public(TRANSXSSM)
def transxssm(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None, theta: Any = None,
    **options: Unpack[Mamba2Options],
) -> Any:
    """TransXSSM: Mamba-2 whose input and output vectors rotate with their position.

        dt_t = clip(softplus(dt_t + dt_bias))        softplus only with dt_softplus=True
        S_t = e^{dt_t A} R S_{t-1} + B_t^T (dt_t x_t)        R turns rows (2 p, 2 p + 1) by -theta_p
        out_t = (scale C_t S_t + D x_t) silu(z_t)

    x        (..., T, H, V)     inputs (the values)
    dt       (..., T, H)        step sizes
    A        (H,)               decay rate of the head, < 0 (-exp(A_log))
    B        (..., T, Hk, K)    input vectors (the keys), not rotated; Hk groups of heads share one
    C        (..., T, Hq, K)    output vectors (the queries), not rotated; None: write only
    D        (H,) or (H, V)     skip connection
    z        (..., T, H, V)     gate: out times silu(z)
    dt_bias  (H,)               added to dt
    theta    (P,)               angle a token of channels (2 p, 2 p + 1), with its gradient; channels from 2 P on do
                                not rotate. None: 10000^{-linspace(0, 1, K // 2)}

    dt_softplus=False, dt_limit=(0, inf): the clip that dt goes through. The state is in the frame of the last token:
    the next call goes on without an offset.
    scale=None means 1. Returns out (..., T, H, V), and the state (..., H, K, V) if return_state.
    Raises ValueError or TypeError for shapes, dtypes and options that do not fit.
    Core: matrix_state, decay SCALAR, erase NONE. Common options: linattn_np.options.Options.
    Wu, Shen et al., arXiv 2506.09507; Dao, Gu, arXiv 2405.21060.
    """
