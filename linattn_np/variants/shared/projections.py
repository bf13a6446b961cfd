"""Raw projections as inputs: queries and keys before a feature map or a norm, gates and strengths before a formula.

    feature_map given:    q_t <- phi(q_t),  k_t <- phi(k_t)                          (..., M)
    qk_l2norm=True:       q_t <- q_t / |q_t|,  k_t <- k_t / |k_t|                    (zero rows stay 0)
      with l2norm_eps:    q_t <- q_t / sqrt(|q_t|^2 + eps), and k_t likewise
    beta_sigmoid=True:    beta_t <- sigmoid(beta_t), and twice that with allow_neg_eigval=True
    A_log given:          g_t <- -e^{A_log} softplus(g_t + dt_bias)
    lower_bound given:    g_t <- lower_bound sigmoid(e^{A_log} (g_t + dt_bias))

The core computes norms, strengths and gates (matrix_state/preprocess.py), since its kernels can when they load them.

The map comes first: qk_l2norm divides mapped rows, a delta rule erases along the mapped key, and the state is
(..., H, M, V) for maps of M features. scale=None stays that of the K channels before the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ...call.options import Options
from ...matrix_state.types import Inputs, both
from ...ops.feature_maps import feature_map_pair
from ...runtime.arrays import Array
from ...runtime.shapes import check_state
from ...spec import ArgSpec, Call, ChangeOfVariables, Samples, StateFormat, VariantSpec
from .similarity import Similarity


class ProjectionOptions(Options, total=False):
    """The common options and the norm of q and k."""

    qk_l2norm: bool
    l2norm_eps: float


class StrengthOptions(ProjectionOptions, total=False):
    """Also: beta is a raw projection."""

    beta_sigmoid: bool
    allow_neg_eigval: bool


class GateOptions(ProjectionOptions, total=False):
    """Also: the gate has a lower bound."""

    lower_bound: float | None


class GatedStrengthOptions(StrengthOptions, GateOptions, total=False):
    """Raw strengths and gates with a lower bound."""


def raw_options(beta: bool = True, gate: bool = True) -> dict[str, Any]:
    """The options of a variant; beta: it has strengths, gate: it has the arrays of the gate formula."""
    defaults: dict[str, Any] = {"qk_l2norm": False, "l2norm_eps": 0.0}
    if beta:
        defaults |= {"beta_sigmoid": False, "allow_neg_eigval": False}
    if gate:
        defaults["lower_bound"] = None
    return defaults


def check_raw(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that needs another one."""
    if options["l2norm_eps"] and not options["qk_l2norm"]:
        raise ValueError(f"{fn}: l2norm_eps is {options['l2norm_eps']} without a norm, expected qk_l2norm=True")
    check_strengths(fn, options)


def check_strengths(fn: str, options: dict[str, Any]) -> None:
    """Raise ValueError for twice a sigmoid that there is not."""
    if options.get("allow_neg_eigval") and not options["beta_sigmoid"]:
        raise ValueError(f"{fn}: allow_neg_eigval=True without a sigmoid, expected beta_sigmoid=True, or beta doubled")


SAMPLES = Samples({"k": "unit"}, ({}, {"qk_l2norm": True}))


def gate_arrays(bias: str = "H") -> dict[str, ArgSpec]:
    """The arrays of the formula; bias: the shape of dt_bias."""
    words = "log of the gate's rate; given, g is a raw projection: the log decay is -e^{A_log} softplus(g + dt_bias)"
    return {"A_log": ArgSpec("H", words, optional=True, reinterprets="g"),
            "dt_bias": ArgSpec(bias, "added to the raw g", optional=True, reinterprets="g")}  # fmt: skip


def raw_gate(c: Call) -> Array | None:
    """The core's g.   Raises ValueError if a part of the formula is missing."""
    bounded = c.options["lower_bound"] is not None
    if c.g is None and bounded:
        raise ValueError(f"{c.name}: lower_bound is given without g, expected g to be the raw projection")
    if c.dt_bias is not None and c.A_log is None and not bounded:
        raise ValueError(f"{c.name}: dt_bias is given without A_log, expected both, A_log alone, or lower_bound")
    if c.g is None and c.A_log is not None:
        raise ValueError(f"{c.name}: A_log is given without g, expected g to be the raw projection")
    return c.g if c.g is None or _by_channel(c) else c.g[..., None]


def raw_gate_vjp(c: Call, dg: Array) -> dict[str, Array]:
    return {"g": dg if _by_channel(c) else dg[..., 0]}


def gate_bias(c: Call) -> Array | None:
    """The core's bias, which is added to the channels of g."""
    return c.dt_bias if c.dt_bias is None or _by_channel(c) else c.dt_bias[..., None]


def gate_bias_vjp(c: Call, dbias: Array) -> dict[str, Array]:
    return {"dt_bias": c.xp.reshape(dbias, tuple(c.dt_bias.shape))}


LOG_DECAY: dict[str, Any] = {  # inputs of `products`: log decays, or raw projections and the arrays of their formula
    "g": (raw_gate, raw_gate_vjp),
    "A_log": (lambda c: c.A_log, lambda c, dA: {"A_log": dA}),
    "bias": (gate_bias, gate_bias_vjp),
}


def _by_channel(c: Call) -> bool:
    """Whether g is (..., T, H, K)."""
    return c.g.ndim == len(c.batch) + 3


# feature maps of queries and keys


class MappedOptions(Options, total=False):
    """The common options and a feature map of q and k."""

    feature_map: Any


class MappedStrengthOptions(StrengthOptions, MappedOptions, total=False):
    """The options of raw projections and a feature map of q and k."""


class MappedGatedOptions(GatedStrengthOptions, MappedOptions, total=False):
    """Also: the options of a raw gate."""


SIMILARITY = Similarity(lambda c: feature_map_pair(c.name, c.options["feature_map"]))


def _mapped(base: ChangeOfVariables[Inputs], c: Call) -> Inputs:
    """The core's inputs by `base`, with feature maps of its queries and keys."""
    x = base.to_core(c)
    if is_plain(c.options):
        return x
    mapped = SIMILARITY.mapped(c)
    return x._replace(q=mapped["q"], k=mapped["k"], r=mapped["k"] if x.r is x.k else x.r)


def _mapped_vjp(base: ChangeOfVariables[Inputs], c: Call, d: Inputs) -> dict[str, Array]:
    """phi(k) is the key and the erase vector: both gradients are added, then mapped back once."""
    if is_plain(c.options):
        return base.to_core_vjp(c, d)
    mapped = SIMILARITY.mapped_vjp(c, {"q": d.q, "k": both(d.k, d.r)})
    return base.to_core_vjp(c, d._replace(q=mapped.get("q"), k=mapped["k"], r=None))


def is_plain(options: Any) -> bool:
    """Whether there is no map, so that the state is the core's."""
    return isinstance(options["feature_map"], str) and options["feature_map"] == "identity"


def pack_state(c: Call, state: Any) -> Any:
    """Checks that the state is as wide as the mapped keys."""
    if state is not None and is_plain(c.options):
        check_state(c.name, state, c.sizes)
    elif state is not None:
        SIMILARITY.check(c, state)
    return state


def with_feature_map(spec: VariantSpec) -> VariantSpec:
    """The variant with the option feature_map."""
    change = replace(spec.change, to_core=partial(_mapped, spec.change), to_core_vjp=partial(_mapped_vjp, spec.change))
    state = StateFormat(pack=pack_state, plain=is_plain, wide=True)
    options = {**spec.options, "feature_map": "identity"}
    return replace(spec, change=change, state=state, options=options, check_options=partial(_check, spec.check_options))


def _check(own: Callable[[str, dict[str, Any]], None] | None, fn: str, options: dict[str, Any]) -> None:
    if own is not None:
        own(fn, options)
    if not is_plain(options):
        feature_map_pair(fn, options["feature_map"])
