"""Raw projections as inputs: queries and keys before a feature map or a norm, gates and strengths before a formula.

    feature_map given:    q_t <- phi(q_t),  k_t <- phi(k_t)                          (..., M)
    qk_l2norm=True:       q_t <- q_t / |q_t|,  k_t <- k_t / |k_t|                    (zero rows stay 0)
      with l2norm_eps:    q_t <- q_t / sqrt(|q_t|^2 + eps), and k_t likewise
    beta_sigmoid=True:    beta_t <- sigmoid(beta_t), and twice that with allow_neg_eigval=True
    A_log given:          g_t <- -e^{A_log} softplus(g_t + dt_bias)
    lower_bound given:    g_t <- lower_bound sigmoid(e^{A_log} (g_t + dt_bias))

The core normalises and computes strengths (matrix_state/preprocess.py), since some kernels get the norms from products
that they compute anyway. The gate formula is a change of variables, here with its transpose.

The map comes first: qk_l2norm divides mapped rows, a delta rule erases along the mapped key, and the state is
(..., H, M, V) for maps of M features. scale=None stays that of the K channels before the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ...call.options import Options
from ...matrix_state import core as matrix_state
from ...matrix_state.types import Inputs, Plan, both
from ...ops import gate_formula
from ...ops.feature_maps import feature_map_pair
from ...products import Formula
from ...runtime.arrays import Array, cast
from ...runtime.shapes import check_state
from ...spec import ArgSpec, ChangeOfVariables, OptionSpec, Samples, StateFormat, Variables, VariantSpec
from .similarity import Similarity


class ProjectionOptions(Options, total=False):
    """The common options, and: divide q and k by their length."""

    qk_l2norm: bool
    l2norm_eps: float


class StrengthOptions(ProjectionOptions, total=False):
    """And: beta is a raw projection."""

    beta_sigmoid: bool
    allow_neg_eigval: bool


class GateOptions(ProjectionOptions, total=False):
    """And: the gate has a lower bound."""

    lower_bound: float | None


class GatedStrengthOptions(StrengthOptions, GateOptions, total=False):
    """Both."""


def raw_options(beta: bool = True, gate: bool = True) -> OptionSpec:
    """The options of a variant; beta, gate: whether it has strengths, and the arrays of the gate formula."""
    defaults: dict[str, Any] = {"qk_l2norm": False, "l2norm_eps": 0.0}
    if beta:
        defaults |= {"beta_sigmoid": False, "allow_neg_eigval": False}
    if gate:
        defaults["lower_bound"] = None
    return OptionSpec(defaults, _check)


def _check(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option whose other half is missing."""
    if options["l2norm_eps"] and not options["qk_l2norm"]:
        raise ValueError(f"{fn}: l2norm_eps is {options['l2norm_eps']} without a norm, expected qk_l2norm=True")
    if options.get("allow_neg_eigval") and not options["beta_sigmoid"]:
        raise ValueError(f"{fn}: allow_neg_eigval=True without a sigmoid, expected beta_sigmoid=True, or beta doubled")


SAMPLES = Samples({"k": "unit"}, ({}, {"qk_l2norm": True}))


def gate_arrays(bias: str = "H") -> dict[str, ArgSpec]:
    """The arrays of the formula; bias: the shape of dt_bias."""
    words = "log of the gate's rate; given, g is a raw projection: the log decay is -e^{A_log} softplus(g + dt_bias)"
    return {"A_log": ArgSpec("H", words, optional=True, reinterprets="g"),
            "dt_bias": ArgSpec(bias, "added to the raw g", optional=True, reinterprets="g")}  # fmt: skip


def log_decay(c: Variables) -> Array:
    """g, or the log decay by a formula.   Raises ValueError for a part of a formula without the rest."""
    if (bounded := _bounded(c)) is not None:
        if c.g is None:
            raise ValueError(f"{c.name}: lower_bound is given without g, expected g to be the raw projection")
        return gate_formula.bounded(c.xp, c.g, bounded, c.dtype, _by_channel(c))
    if c.A_log is None:
        if c.dt_bias is not None:
            raise ValueError(f"{c.name}: dt_bias is given without A_log, expected both, A_log alone, or lower_bound")
        return c.g
    if c.g is None:
        raise ValueError(f"{c.name}: A_log is given without g, expected g to be the raw projection")
    return gate_formula.log_decay(c.xp, c.g, c.A_log, c.dt_bias, c.dtype, _by_channel(c))


def log_decay_vjp(c: Variables, dg: Array) -> dict[str, Array]:
    """Gradients of g, A_log and dt_bias, those that are given."""
    bounded = _bounded(c)
    if c.A_log is None and bounded is None:
        return {"g": dg}
    xp, dg = c.xp, cast(c.xp, dg, c.dtype)
    if bounded is not None:
        da, dA, dbias = gate_formula.bounded_vjp(xp, c.g, bounded, dg, _by_channel(c))
    else:
        da, dA, dbias = gate_formula.log_decay_vjp(xp, c.g, c.A_log, c.dt_bias, dg, _by_channel(c))
    grads = {"g": da} if dA is None else {"g": da, "A_log": dA}
    return grads if c.dt_bias is None else grads | {"dt_bias": xp.reshape(dbias, tuple(c.dt_bias.shape))}


def _bounded(c: Variables) -> gate_formula.Bounded | None:
    """The parameters of the gate with a lower bound; None without one."""
    bound = c.options["lower_bound"]
    return None if bound is None else gate_formula.Bounded(float(bound), c.A_log, c.dt_bias)


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


class MappedStrengthOptions(StrengthOptions, MappedOptions, total=False):
    """Those of raw projections, and: a feature map of q and k."""


class MappedGatedOptions(GatedStrengthOptions, MappedOptions, total=False):
    """Likewise with a gate."""


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


def record(c: Variables, x: Inputs, plan: Plan, residuals: Any, arrays: list[Any], state: Any) -> Any:
    """The recorded plan of a NumPy call; None with a map."""
    return matrix_state.record(x, plan, state, residuals, arrays) if is_plain(c.options) else None


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
