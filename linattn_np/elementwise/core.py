"""The elementwise core: the functions of the protocol `linattn_np/core.py:Core`.

    h_t = a_t h_{t-1} + x_t,   out_t = scale h_t

Channels do not meet, or only N neighbours where a_t are matrices, so a state has the axes of a token. The choice of a
backend is a pure function of library, dtype, shape and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..core import Computed, Core, Explained, register
from ..ops.host import has_compiler
from ..runtime.arrays import Array, as_computed, complex_of, device, is_complex, is_cupy, is_numpy
from ..runtime.shapes import Sequence, Sizes
from . import array, definition, policy
from .types import Inputs, Plan, Residuals


class Elementwise(Core):
    """A recurrence of every channel by itself."""

    BACKENDS = ("reference", "chunks", "numba", "cuda")
    STATE_AXES = {"state": "D"}  # noqa: RUF012

    def plan(self, fields: dict[str, Any], spec: Any, options: Mapping[str, Any], sizes: Sizes) -> Plan:
        """The plan of a call, with the state that outputs are."""
        return Plan(**fields, reads_previous=spec.query_reads.name == "PREVIOUS")

    def transfers(self, spec: Any) -> str:
        """Products of factors, or the decays of a state whose numbers share a gauge."""
        return "factors" if spec.state.log_decays is None else "decays"

    def forward(self, fn: str, x: Inputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(the states of all tokens, the final state, residuals)."""
        backend = choose(fn, x, plan, wanted)
        if (calls := compiled(backend)) is not None:
            out, end, marks = calls.forward(plan, x, state)
        else:
            each = [MODULES[backend].forward(plan.xp, own, h, scan_length(plan))
                    for _, own, h in each_sequence(plan, x, state)]  # fmt: skip
            out, end, marks = (
                joined(plan, x.x, [scaled(y, plan) for y, _ in each]),
                gathered(plan, [h for _, h in each]),
                None,
            )
        if plan.reads_previous:
            out = delayed(plan, x, state, out)
        return out, end, Residuals(x, plan, backend, state, marks)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Inputs, Any]:
        """Gradients of the inputs and of the initial state; states are computed again."""
        x, plan, backend = residuals[:3]
        first = None
        if plan.reads_previous and dout is not None:
            dout, first = delayed_vjp(plan, x, dout)
        if (calls := compiled(backend)) is not None:
            grads, begin = calls.backward(residuals, dout, dstate)
        else:
            grads, begin = self._backward(residuals, dout, dstate)
        return grads, begin if first is None else begin + scaled(first, plan)

    def _backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Inputs, Any]:
        """By array calls, sequence by sequence."""
        x, plan, backend, state, _ = residuals
        xp, found, begins = plan.xp, list[Inputs](), []
        d = None if dout is None else scaled(as_computed(xp, dout, plan.dtype), plan)
        for (s, own, h), (_, _, p) in zip(each_sequence(plan, x, state), each_sequence(plan, x, dstate), strict=True):
            part = None if d is None else d[..., s.start : s.stop, :]
            grads, begin = MODULES[backend].backward(xp, own, h, part, p, scan_length(plan))
            found.append(grads)
            begins.append(begin)
        dx = joined(plan, x.x, [each.x for each in found])
        gates = [each.gate for each in found]
        gate = sum(gates[1:], gates[0]) if x.is_constant else joined(plan, x.gate, gates, x.gate_axes)
        return x.with_gate(dx, gate), gathered(plan, begins)

    def explain(self, fn: str, x: Inputs, plan: Plan, wanted: str | None) -> Explained:
        """Two operations a factor, eight a complex one; the prefixes of array calls take three times as many."""
        backend = choose(fn, x, plan, wanted)
        others = {n: unsupported_reason(x, plan, n) or "covers the call too" for n in self.BACKENDS if n != backend}
        form = FORMS.get(backend, "recurrent form")
        each = (8.0 if any(y is not None and is_complex(y) for y in x) else 2.0) * x.x.shape[-1]
        each *= x.block * (3 if backend == "chunks" else 1)
        reason = "requested" if wanted else "the default path"
        if backend == "cuda":
            reason = f"{reason}: {compiled(backend).described(plan, x)}"
        return Explained(backend, reason, others, form, scan_length(plan) if backend == "chunks" else None,
                         each * prod(x.x.shape[:-1]), each)  # fmt: skip


FORMS = {"chunks": "associative scan", "cuda": "tiles"}  # by backend, of others the recurrent form
MODULES = {"reference": definition, "chunks": array}


def compiled(backend: str) -> Any:
    """The calls of a backend of compiled code; None for one of array calls."""
    if backend == "numba":
        from .cpu import calls

        return calls
    if backend == "cuda":
        from .cuda import calls as cuda_calls

        return cuda_calls
    return None


def scaled(y: Array, plan: Plan) -> Array:
    """scale y"""
    return y if plan.scale == 1 else plan.scale * y


def scan_length(plan: Plan) -> int | None:
    """Tokens of one scan of array calls; None: all."""
    return plan.chunk_size if isinstance(plan.chunk_size, int) else None


# sequences


def each_sequence(plan: Plan, x: Inputs, state: Any) -> list[tuple[Sequence, Inputs, Array]]:
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


def joined(plan: Plan, like: Array, parts: list[Array], axes: int = 1) -> Array:
    """Rows of all sequences, or pieces of them, one after the other; axes: of one token."""
    if not parts:
        return plan.xp.zeros(like.shape, dtype=plan.dtype, device=device(like))
    return parts[0] if len(parts) == 1 else plan.xp.concat(parts, axis=-1 - axes)


def gathered(plan: Plan, states: list[Array], axes: int = 1) -> Array:
    """A state for each sequence of a ragged batch, else the one there is; axes: of one state."""
    if plan.sequences[0].row is None:
        return states[0]
    return plan.xp.stack([plan.xp.reshape(h, h.shape[-axes:]) for h in states])


def delayed(plan: Plan, x: Inputs, state: Any, out: Array) -> Array:
    """scale h_{t-1} of every token from scale h_t."""
    parts = []
    for s, _, h in each_sequence(plan, x, state):
        rows = plan.xp.concat([scaled(h, plan)[..., None, :], out[..., s.start : s.stop, :]], axis=-2)
        parts.append(rows[..., :-1, :])
    return joined(plan, x.x, parts)


def delayed_vjp(plan: Plan, x: Inputs, dout: Array) -> tuple[Array, Array]:
    """(gradient of scale h_t, that of the initial states) from the gradient of `delayed`."""
    xp, dout, parts, firsts = plan.xp, as_computed(plan.xp, dout, plan.dtype), [], []
    for s in plan.sequences:
        zero = xp.zeros((*dout.shape[:-2], 1, dout.shape[-1]), dtype=dout.dtype, device=device(dout))
        rows = xp.concat([dout[..., s.start : s.stop, :], zero], axis=-2)
        firsts.append(rows[..., 0, :])
        parts.append(rows[..., 1:, :])
    return joined(plan, x.x, parts), gathered(plan, firsts)


# the choice of a backend


def unsupported_reason(x: Any, plan: Plan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    if backend == "reference" and plan.chunk_size == "parallel":
        return "the definition goes token by token; chunk_size='parallel' needs a scan"
    if backend == "numba" and not is_numpy(plan.xp):
        return "it takes NumPy arrays"
    if backend == "numba" and not has_compiler():
        return "Numba, the compiler of its loops, is not installed"
    if backend == "cuda":
        if not is_cupy(plan.xp):
            return "it takes CuPy arrays"
        if x.A is not None:
            return "it has no kernel of matrices"
        return compiled(backend).unsupported_reason(x, plan)
    return None


def choose(fn: str, x: Inputs, plan: Plan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is not None:
        if (reason := unsupported_reason(x, plan, wanted)) is not None:
            raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
        return wanted
    if unsupported_reason(x, plan, "numba") is None:
        return "numba"
    if policy.CUDA and unsupported_reason(x, plan, "cuda") is None:
        return "cuda"
    return "reference" if plan.chunk_size == 1 else "chunks"


CORE = Elementwise()
register(CORE, Inputs)
