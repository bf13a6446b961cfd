"""Raw projections as inputs: queries and keys before a feature map or a norm, a gate before its formula.

    feature_map given:   q_t <- phi(q_t),  k_t <- phi(k_t)                          (..., M)
    qk_l2norm=True:  q_t <- q_t / |q_t|,  k_t <- k_t / |k_t|                       (zero rows stay 0)
    A_log given:     g_t <- -e^{A_log} softplus(g_t + dt_bias)

The core normalises (matrix_state/preprocess.py), since some kernels get the norms from products that they compute
anyway. The gate formula is a change of variables, here with its transpose.

The map comes first: qk_l2norm divides mapped rows, a delta rule erases along the mapped key, and the state is
(..., H, M, V) for maps of M features. scale=None stays that of the K channels before the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ...call.options import Options
from ...matrix_state import core as matrix_state
from ...matrix_state.types import Inputs, both
from ...ops import gate_formula
from ...ops.feature_maps import feature_map_pair
from ...products import Formula
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, Names, OptionSpec, Samples, StateFormat, Variables, VariantSpec
from .similarity import Similarity


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


# feature maps of queries and keys


class MappedOptions(Options, total=False):
    """The common options, and: a feature map of q and k."""

    feature_map: Any


class MappedProjectionOptions(ProjectionOptions, total=False):
    """Those of raw projections, and: a feature map of q and k."""

    feature_map: Any


SIMILARITY = Similarity(lambda c: feature_map_pair(c.name, c.options["feature_map"]))


class Mapped(NamedTuple):
    """The change of variables `base` with feature maps of the core's queries and keys."""

    base: ChangeOfVariables[Inputs]

    def to_core(self, c: Variables) -> Inputs:
        x = self.base.to_core(c)
        if is_plain(c.options):
            return x
        mapped = SIMILARITY.mapped(c)
        return x._replace(q=mapped["q"], k=mapped["k"], r=mapped["k"] if x.r is x.k else x.r)

    def to_core_vjp(self, c: Variables, d: Inputs) -> dict[str, Array]:
        """The gradient of phi(k), as a key and as what is erased, is mapped back once."""
        if is_plain(c.options):
            return self.base.to_core_vjp(c, d)
        mapped = SIMILARITY.mapped_vjp(c, {"q": d.q, "k": both(d.k, d.r)})
        return self.base.to_core_vjp(c, d._replace(q=mapped.get("q"), k=mapped["k"], r=None))


def is_plain(options: Any) -> bool:
    """Whether there is no map: the state is that of the core."""
    return isinstance(options["feature_map"], str) and options["feature_map"] == "identity"


def pack_state(c: Variables, state: Any) -> Any:
    """Only checks: the state is as wide as the mapped keys."""
    if state is not None and is_plain(c.options):
        check_state(c.name, state, c.sizes)
    elif state is not None:
        SIMILARITY.check(c, state)
    return state


def record(call: Any, names: Names, state: Any, residuals: Any) -> Any:
    """The recorded plan of a NumPy call."""
    trace, c = call.variables.traced(names)
    return matrix_state.record(call.spec.change.to_core(c), call.plan, state, residuals, trace)


def with_feature_map(spec: VariantSpec) -> VariantSpec:
    """The variant with the option feature_map."""
    change = Mapped(spec.change)
    state = StateFormat(pack=pack_state, record=record, plain=is_plain, wide=True)
    options = replace(spec.options, defaults={**spec.options.defaults, "feature_map": "identity"},
                      check=_checked(spec.options))  # fmt: skip
    return replace(spec, change=replace(spec.change, to_core=change.to_core, to_core_vjp=change.to_core_vjp),
                   state=state, options=options)  # fmt: skip


def _checked(own: OptionSpec) -> Callable[[str, dict[str, Any]], None]:
    def check(fn: str, options: dict[str, Any]) -> None:
        if own.check is not None:
            own.check(fn, options)
        if not is_plain(options):
            feature_map_pair(fn, options["feature_map"])

    return check
