"""Log decays with a declared lower bound that kernels may use: no g is below gate_lower_bound."""

from __future__ import annotations

from ...call.options import Options


class BoundedGateOptions(Options, total=False):
    """The common options and gate_lower_bound."""

    gate_lower_bound: float | None


BOUNDED_GATES = {"gate_lower_bound": None}
