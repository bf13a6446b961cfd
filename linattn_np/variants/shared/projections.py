"""Raw projections as inputs: queries and keys of any length, a gate before its formula.

    qk_l2norm=True:  q_t <- q_t / |q_t|,  k_t <- k_t / |k_t|                       (zero rows stay 0)
    A_log given:     g_t <- -e^{A_log} softplus(g_t + dt_bias)

The core normalises (matrix_state/preprocess.py), since some kernels get the norms from products that they compute
anyway. The gate formula is a change of variables, here with its transpose.
"""

from __future__ import annotations

from ...call.options import Options
from ...ops import gate_formula
from ...products import Formula
from ...runtime.arrays import Array, cast
from ...spec import ArgSpec, OptionSpec, Samples, Variables


class ProjectionOptions(Options, total=False):
    """The common options, and: divide q and k by their length."""

    qk_l2norm: bool


OPTIONS = OptionSpec({"qk_l2norm": False})
SAMPLES = Samples({"k": "unit"}, ({}, {"qk_l2norm": True}))


def gate_arrays(bias: str = "H") -> dict[str, ArgSpec]:
    """The arrays of the formula; bias: the shape of dt_bias."""
    words = "log of the gate's rate; given, g is a raw projection: the log decay is -e^{A_log} softplus(g + dt_bias)"
    return {"A_log": ArgSpec("H", words, optional=True, reinterprets="g"),
            "dt_bias": ArgSpec(bias, "added to the raw g", optional=True, reinterprets="g")}  # fmt: skip


def log_decay(c: Variables) -> Array:
    """g, or the log decay by the formula.   Raises ValueError for a part of the formula without the rest."""
    if c.A_log is None:
        if c.dt_bias is not None:
            raise ValueError(f"{c.name}: dt_bias is given without A_log, expected both, or A_log alone")
        return c.g
    if c.g is None:
        raise ValueError(f"{c.name}: A_log is given without g, expected g to be the raw projection")
    return gate_formula.log_decay(c.xp, c.g, c.A_log, c.dt_bias, c.dtype, _by_channel(c))


def log_decay_vjp(c: Variables, dg: Array) -> dict[str, Array]:
    """Gradients of g, A_log and dt_bias, those that are given."""
    if c.A_log is None:
        return {"g": dg}
    xp, dg = c.xp, cast(c.xp, dg, c.dtype)
    da, dA, dbias = gate_formula.log_decay_vjp(xp, c.g, c.A_log, c.dt_bias, dg, _by_channel(c))
    grads = {"g": da, "A_log": dA}
    return grads if c.dt_bias is None else grads | {"dt_bias": xp.reshape(dbias, tuple(c.dt_bias.shape))}


def _core_decay(c: Variables) -> Array | None:
    g = log_decay(c)
    return g if g is None or _by_channel(c) else g[..., None]


def _core_decay_vjp(c: Variables, dg: Array) -> dict[str, Array]:
    return log_decay_vjp(c, dg if _by_channel(c) else dg[..., 0])


LOG_DECAY = Formula(_core_decay, _core_decay_vjp)  # the core's g


def _by_channel(c: Variables) -> bool:
    """Whether g is (..., T, H, K)."""
    return c.g.ndim == len(c.sizes.batch) + 3
