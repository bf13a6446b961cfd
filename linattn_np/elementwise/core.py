"""The elementwise core: the functions of the protocol `linattn_np/core.py:Core`.

    h_t = a_t h_{t-1} + x_t,   out_t = scale h_t

Channels do not meet, so a state has the axes of a token. The choice of a backend is a pure function of library, dtype,
shape and options.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from math import prod
from typing import Any

from ..core import CallPlan, Computed, Core, Explained, register
from ..runtime.arrays import Array, as_computed, complex_of, device, is_complex, is_numpy
from ..runtime.shapes import Sequence
from . import array, definition
from .types import Inputs, Residuals


class Elementwise(Core):
    """A recurrence of every channel by itself."""

    BACKENDS = ("reference", "chunks", "numba")
    STATE_AXES = {"state": "D"}  # noqa: RUF012

    def forward(self, fn: str, x: Inputs, plan: CallPlan, state: Any, wanted: str | None) -> Computed:
        """(the states of all tokens, the final state, residuals)."""
        backend, outs, ends = choose(fn, x, plan, wanted), [], []
        if backend == "numba":
            from .cpu import calls

            out, end, marks = calls.forward(plan, x, state)
            return out, end, Residuals(x, plan, backend, state, marks)
        for _, own, h in each_sequence(plan, x, state):
            out, end = MODULES[backend].forward(plan.xp, own, h, scan_length(plan))
            outs.append(scaled(out, plan))
            ends.append(end)
        return joined(plan, x, outs), gathered(plan, ends), Residuals(x, plan, backend, state)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Inputs, Any]:
        """Gradients of the inputs and of the initial state; states are computed again."""
        x, plan, backend, state, _ = residuals
        if backend == "numba":
            from .cpu import calls

            return calls.backward(residuals, dout, dstate)
        xp, found, begins = plan.xp, list[Inputs](), []
        d = None if dout is None else scaled(as_computed(xp, dout, plan.dtype), plan)
        for (s, own, h), (_, _, p) in zip(each_sequence(plan, x, state), each_sequence(plan, x, dstate), strict=True):
            part = None if d is None else d[..., s.start : s.stop, :]
            grads, begin = MODULES[backend].backward(xp, own, h, part, p, scan_length(plan))
            found.append(grads)
            begins.append(begin)
        dx = joined(plan, x, [each.x for each in found])
        gates = [each.gate for each in found]
        gate = sum(gates[1:], gates[0]) if x.is_constant else joined(plan, x, gates)
        return Inputs(dx, gate) if x.g is None else Inputs(dx, None, gate), gathered(plan, begins)

    def explain(self, fn: str, x: Inputs, plan: CallPlan, wanted: str | None) -> Explained:
        """Two operations a channel, eight a complex one; the prefixes of array calls take three times as many."""
        backend = choose(fn, x, plan, wanted)
        others = {n: unsupported_reason(x, plan, n) or "covers the call too" for n in self.BACKENDS if n != backend}
        form = "associative scan" if backend == "chunks" else "recurrent form"
        each = (8.0 if any(y is not None and is_complex(y) for y in x) else 2.0) * x.x.shape[-1]
        each *= 3 if backend == "chunks" else 1
        reason = "requested" if wanted else "the default path"
        return Explained(backend, reason, others, form, scan_length(plan) if backend == "chunks" else None,
                         each * prod(x.x.shape[:-1]), each)  # fmt: skip


MODULES = {"reference": definition, "chunks": array}


def scaled(y: Array, plan: CallPlan) -> Array:
    """scale y"""
    return y if plan.scale == 1 else plan.scale * y


def scan_length(plan: CallPlan) -> int | None:
    """Tokens of one scan of array calls; None: all."""
    return plan.chunk_size if isinstance(plan.chunk_size, int) else None


# sequences


def each_sequence(plan: CallPlan, x: Inputs, state: Any) -> list[tuple[Sequence, Inputs, Array]]:
    """(sequence, its tokens, its initial state (..., D)) in the dtype of the computation."""
    xp, shape, found = plan.xp, (*x.x.shape[:-2], x.x.shape[-1]), []
    x = x.computed(xp, plan.dtype)
    kind = complex_of(xp, plan.dtype) if is_complex(x.x) or is_complex(x.gate) else plan.dtype
    for s in plan.sequences:
        if state is None:
            h = xp.zeros(shape, dtype=kind, device=device(x.x))
        else:
            h = as_computed(xp, state if s.row is None else xp.broadcast_to(state[s.row, ...], shape), plan.dtype)
        found.append((s, x.tokens(s.start, s.stop), h))
    return found


def joined(plan: CallPlan, x: Inputs, parts: list[Array]) -> Array:
    """Rows of all sequences, one after the other."""
    if not parts:
        return plan.xp.zeros(x.x.shape, dtype=plan.dtype, device=device(x.x))
    return parts[0] if len(parts) == 1 else plan.xp.concat(parts, axis=-2)


def gathered(plan: CallPlan, states: list[Array]) -> Array:
    """A state for each sequence of a ragged batch, else the one there is."""
    if plan.sequences[0].row is None:
        return states[0]
    return plan.xp.stack([plan.xp.reshape(h, h.shape[-1:]) for h in states])


# the choice of a backend


def unsupported_reason(x: Inputs, plan: CallPlan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    if backend == "reference" and plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs a scan"
    if backend == "numba" and not is_numpy(plan.xp):
        return "it takes NumPy arrays"
    if backend == "numba" and not _has_compiler():
        return "Numba, the compiler of its loops, is not installed"
    return None


@functools.cache
def _has_compiler() -> bool:
    return find_spec("numba") is not None


def choose(fn: str, x: Inputs, plan: CallPlan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is not None:
        if (reason := unsupported_reason(x, plan, wanted)) is not None:
            raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
        return wanted
    if unsupported_reason(x, plan, "numba") is None:
        return "numba"
    return "reference" if plan.chunk_size == 1 else "chunks"


CORE = Elementwise()
register(CORE, Inputs)
