"""Feature maps of queries and keys in front of a change of variables: phi(q_t), phi(k_t) instead of q_t, k_t.

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
from ...ops.feature_maps import feature_map_pair
from ...runtime.arrays import Array
from ...runtime.shapes import check_state
from ...spec import ChangeOfVariables, OptionSpec, StateFormat, Variables, VariantSpec
from .projections import ProjectionOptions
from .similarity import Similarity


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
    return options["feature_map"] == "identity"


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
        feature_map_pair(fn, options["feature_map"])

    return check
