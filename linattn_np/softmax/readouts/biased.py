"""Softmax attention with a number added to the logit of each pair of a query and a key.

    p_tj = e^{scale q_t . k_j + bias_tj} / (e^{sink} + sum_i e^{scale q_t . k_i + bias_ti})

A bias has no place for the slots of a cache: the call begins without one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core import Computed, Explained, register
from ...runtime.arrays import Array
from .. import sequences
from ..core import CORE, Residuals, choose, module_of
from ..states import GivesStates, ends, needs_end, with_state
from ..types import Inputs, Plan


class BiasedInputs(NamedTuple):
    """Arrays of a call, or their gradients; tokens before heads."""

    q: Array  # (..., Tq, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    sinks: Array  # (Hq,)
    bias: Array  # (..., Tq, Hq, T)


class Biased(GivesStates):
    """The core's loops and array calls, with a bias."""

    def forward(self, fn: str, x: BiasedInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        backend, given = choose(fn, x, plan, wanted), core_inputs(x)
        out: Array = None
        logs: Any = None
        if x.q is not None and backend == "numba":
            from ..cpu import calls

            out, logs = calls.forward(plan, given, None)
        elif x.q is not None:
            out, logs = sequences.forward(module_of(backend, given), plan, given, None)
        end = ends(plan, given, None) if needs_end(plan, x) else None
        return out, end, Residuals(given, plan, backend, None, out, logs)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs; there is no initial state."""
        x, plan, backend, _, out, logs = residuals
        if dout is None or x.q is None:
            d = sequences.zeros(plan, x, None)
        elif backend == "numba":
            from ..cpu import calls

            d = calls.backward(plan, x, None, (out, logs), dout)
        else:
            d = sequences.backward(module_of(backend, x), plan, x, None, (out, logs), dout)
        dx = d[0] if dstate is None else with_state(plan, x, None, dstate, d)[0]
        return BiasedInputs(dx.q, dx.k, dx.v, dx.sinks, dx.bias), None

    def reads_out(self, residuals: Residuals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: BiasedInputs, plan: Plan, wanted: str | None) -> Explained:
        """As the core."""
        return CORE.explain(fn, core_inputs(x), plan, wanted, of=x)


def core_inputs(x: BiasedInputs) -> Inputs:
    """In the core's type."""
    return Inputs(x.q, x.k, x.v, sinks=x.sinks, bias=x.bias)


register(Biased(), BiasedInputs)
