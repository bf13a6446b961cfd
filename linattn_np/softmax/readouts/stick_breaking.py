"""Stick-breaking attention: a query takes shares of the remaining stick, from the newest key to the oldest.

    s_tj = sigmoid(scale q_t . k_j),   a_tj = s_tj prod_{j < i < t} (1 - s_ti),   out_t = sum_{j < t} a_tj v_j

The cache is the core's; here its tokens are needed in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core import Computed, Explained, register
from ...runtime.arrays import Array
from .. import cache, sequences
from ..array import stick_tiles
from ..core import CORE, choose
from ..states import GivesStates, ends, needs_end, with_state
from ..types import Inputs, SoftmaxPlan, StickInputs
from . import stick_definition


class StickBreakingResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: Inputs
    plan: SoftmaxPlan
    backend: str
    state: Any
    ordered: Any  # the cache in the order of its tokens
    out: Array
    rest: Any  # arrays that the backend saved


MODULES = {"reference": stick_definition, "chunks": stick_tiles}


class StickBreaking(GivesStates):
    """Attention by shares of the remaining stick."""

    def forward(self, fn: str, x: StickInputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        backend, given = choose(fn, x, plan, wanted), Inputs(*x)
        cache.refuse_array_calls(backend, plan, given, state)
        ordered = cache.ordered(plan, state)
        out: Array = None
        rest: Any = None
        if x.q is not None and backend == "numba":
            from ..cpu import stick_calls

            out = stick_calls.forward(plan, given, ordered)
        elif x.q is not None and backend == "cuda":
            from ..cuda import stick

            out, rest = stick.forward(plan, given), stick.differentiates(given)
        elif x.q is not None:
            out, rest = sequences.forward(MODULES[backend], plan, given, ordered)
        end = ends(plan, given, state) if needs_end(plan, x) else None
        return out, end, StickBreakingResiduals(given, plan, backend, state, ordered, out, rest)

    def backward(self, residuals: StickBreakingResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, ordered, out, rest = residuals
        if backend == "cuda" and rest is False and dout is not None:  # no kernel computes these gradients
            backend = "chunks"
            out, rest = sequences.forward(MODULES[backend], plan, x, ordered)
        if dout is None or x.q is None:
            found = [sequences.zeros(plan, own, row) for _, own, row in sequences.each_sequence(plan, x, ordered)]
            d = sequences.gathered(plan, x, found)
        elif backend == "numba":
            from ..cpu import stick_calls

            d = stick_calls.backward(plan, x, ordered, dout)
        elif backend == "cuda":
            from ..cuda import stick

            d = stick.backward(plan, x, dout)
        else:
            d = sequences.backward(MODULES[backend], plan, x, ordered, (out, rest), dout)
        if state is not None:
            d = d[0], cache.ordered_vjp(plan, state, d[1])
        dx, dbegin = d if dstate is None else with_state(plan, x, state, dstate, d)
        return StickInputs(*dx[:3]), dbegin

    def explain(self, fn: str, x: StickInputs, plan: SoftmaxPlan, wanted: str | None) -> Explained:
        """As the core: 2 (K + V) operations for each pair."""
        return CORE.explain(fn, Inputs(*x), plan, wanted, of=x)


register(StickBreaking(), StickInputs)
