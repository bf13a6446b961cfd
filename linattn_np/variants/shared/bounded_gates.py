"""Log decays with a declared lower bound, of which kernels may make use: no g is below gate_lower_bound."""

from __future__ import annotations

from ...call.options import Options
from ...spec import OptionSpec


class BoundedGateOptions(Options, total=False):
    """The common options, and: a lower bound of the log decays."""

    gate_lower_bound: float | None


BOUNDED_GATES = OptionSpec({"gate_lower_bound": None})
