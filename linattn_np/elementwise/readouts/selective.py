"""The selective scan: a state of N numbers a channel, whose gates, inputs and read-out depend on the token.

    h_t[d, n] = e^{dt_t[d] A[d, n]} h_{t-1}[d, n] + dt_t[d] x_t[d] B_t[n],   out_t[d] = scale sum_n C_t[n] h_t[d, n]

Of complex numbers out is twice the real part: each stands for itself and its conjugate. P, the gradient of h_t through
its own output and all later ones, is that of the elementwise core, of g = dt A and u = dt x:

    dC_t = sum_d dout h*,  dB_t = sum_d u P,  du = sum_n B* P,  dA = sum_t dt dg,  ddt = sum_n A* dg + x du,  dx = dt du

Without A a step erases along its input vector: the decay, of real numbers, is a = 1 - dt B^2 in place of e^{dt A}. With
da = P h_{t-1},

    dB_t = sum_d u P - 2 B sum_d dt da,  ddt = x du - sum_n B^2 da

By array calls a few tokens at a time are channels of that core, so that no array has T x D x N numbers; in compiled
loops (cpu/selective.py) and kernels (cuda/selective.py) the states of a few tokens.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...core import Computation, Computed, Explained, register
from ...runtime.arrays import (
    Array,
    Namespace,
    as_computed,
    cast,
    complex_of,
    conjugate,
    device,
    dtype_name,
    is_complex,
    is_cupy,
)
from ...runtime.shapes import Sequence
from ..core import CORE, MODULES, gathered, joined, scaled, unsupported_reason
from ..types import Inputs, Plan, SelectiveInputs

TOKENS = 64  # of one scan of array calls


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: SelectiveInputs
    plan: Plan
    backend: str
    state: Any
    marks: Any  # the states that pieces of tokens begin with; of the compiled loops one array


class Selective(Computation):
    """The computation of SelectiveInputs."""

    def forward(self, fn: str, x: SelectiveInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
        """(out, the final state (..., D, N), residuals)."""
        if state is not None and is_complex(state) and not x.is_complex:
            raise TypeError(f"{fn}: state has dtype {dtype_name(state)}, expected a real one: A, B and C are real")
        backend = choose(fn, x, plan, wanted)
        if backend == "numba":
            from ..cpu import selective_calls

            out, end, marks = selective_calls.forward(plan, x, state)
            return out, end, Residuals(x, plan, backend, state, marks)
        if backend == "cuda":
            from ..cuda import selective

            out, end, marks = selective.forward(plan, x, state)
            return out, end, Residuals(x, plan, backend, state, marks)
        outs, ends, pieces = list[Array](), list[Array](), list[list[Array]]()
        for s, own, h in each_sequence(plan, x, state):
            pieces.append([])
            for part in parts(plan, s):
                pieces[-1].append(h)
                out, h = forward(plan.xp, own.tokens(*part), h, backend)
                outs.append(out)
            ends.append(h)
        out = scaled(joined(plan, x.x, outs), plan)
        return out, gathered(plan, ends, 2), Residuals(x, plan, backend, state, pieces)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[SelectiveInputs, Any]:
        """Gradients of the inputs and of the initial state; states are computed again, piece by piece."""
        x, plan, backend, state, marks = residuals
        if backend == "numba":
            from ..cpu import selective_calls

            return selective_calls.backward(plan, x, state, marks, dout, dstate)
        if backend == "cuda":
            from ..cuda import selective

            return selective.backward(plan, x, marks, dout, dstate)
        xp, found, begins = plan.xp, [], []
        dout = xp.zeros(x.x.shape, dtype=plan.dtype, device=device(x.x)) if dout is None else dout
        d = scaled(cast(xp, dout, plan.dtype), plan)
        for (s, own, _), (_, _, p), begin in zip(
            each_sequence(plan, x, state), each_sequence(plan, x, dstate), marks, strict=True
        ):
            each = []
            for part, h in zip(reversed(parts(plan, s)), reversed(begin), strict=True):
                dpart = d[..., s.start + part[0] : s.start + part[1], :]
                grads, p = backward(xp, own.tokens(*part), h, dpart, p, backend)
                each.append(grads)
            found += each[::-1]
            begins.append(p)
        return together(plan, residuals.x, found), gathered(plan, begins, 2)

    def asks_for_state(self, fn: str, x: SelectiveInputs, plan: Plan, wanted: str | None) -> bool:
        """Whether the backend asks plan.neighbours for the initial state."""
        return choose(fn, x, plan, wanted) == "cuda" and plan.sequences[0].row is None

    def explain(self, fn: str, x: SelectiveInputs, plan: Plan, wanted: str | None) -> Explained:
        """Six operations of a state's number: e^{dt A} or 1 - dt B^2 are two of them."""
        backend = choose(fn, x, plan, wanted)
        others = {n: reason(x, plan, n) or "covers the call too" for n in CORE.BACKENDS if n != backend}
        form = FORMS.get(backend, "recurrent form")
        each = (18.0 if x.is_complex else 6.0) * prod(x.channels)
        length = length_of(plan) if backend == "chunks" else None
        fast = "cuda" if is_cupy(plan.xp) else "numba"
        why = "requested" if wanted else reason(x, plan, fast) or "the default path"
        return Explained(backend, why, others, form, length, each * prod(x.x.shape[:-1]), each)


FORMS = {"chunks": "associative scan", "cuda": "tiles of tokens in turn"}  # by backend


# array calls, of a few tokens of one sequence


def rows(xp: Namespace, x: SelectiveInputs) -> Inputs:
    """The tokens as those of the elementwise core, with D N channels."""
    dt, B = x.dt[..., None], x.B[..., None, :]
    u = flat(xp, dt * x.x[..., None] * B)
    return Inputs(u, a=flat(xp, 1 - dt * B * B)) if x.A is None else Inputs(u, g=flat(xp, dt * x.A))


def forward(xp: Namespace, x: SelectiveInputs, h: Array, backend: str) -> tuple[Array, Array]:
    """(out, the states after the tokens)."""
    states, end = MODULES[backend].forward(xp, rows(xp, x), flat(xp, h), None)
    out = xp.sum(apart(xp, states, x) * x.C[..., None, :], axis=-1)
    return (2 * xp.real(out) if is_complex(out) else out), xp.reshape(end, h.shape)


def backward(
    xp: Namespace, x: SelectiveInputs, h: Array, dout: Array, p: Array, backend: str
) -> tuple[SelectiveInputs, Array]:
    """(gradients of the inputs, of the states before the tokens); p: of those after them."""
    own, module, u = rows(xp, x), MODULES[backend], x.dt * x.x
    states = apart(xp, module.forward(xp, own, flat(xp, h), None)[0], x)
    dout = (2 * dout if x.is_complex else dout)[..., None]
    dread = xp.reshape(dout * conjugate(xp, x.C)[..., None, :], own.x.shape)
    d, begin = module.backward(xp, own, flat(xp, h), dread, flat(xp, p), None)
    P, dgate = apart(xp, d.x, x), apart(xp, d.gate, x)
    dB, dC = xp.sum(u[..., None] * P, axis=-2), xp.sum(dout * conjugate(xp, states), axis=-2)
    du = _real(xp, xp.sum(P * conjugate(xp, x.B)[..., None, :], axis=-1))
    each = x.dt[..., None] * dgate
    if x.A is None:
        B, dA = x.B[..., None, :], None
        dB, ddt = dB - 2 * x.B * xp.sum(each, axis=-2), x.x * du - xp.sum(dgate * (B * B), axis=-1)
    else:
        dA = xp.sum(each, axis=tuple(range(each.ndim - 2)))
        ddt = _real(xp, xp.sum(dgate * conjugate(xp, x.A), axis=-1)) + x.x * du
    grads = SelectiveInputs(x.dt * du, ddt, dA, dB, dC)
    return grads, xp.reshape(begin, h.shape)


def apart(xp: Namespace, y: Array, x: Any) -> Array:
    """(..., D N) as (..., D, N); x: inputs with an x (..., D) and a B (..., N)."""
    return xp.reshape(y, (*y.shape[:-1], x.x.shape[-1], x.B.shape[-1]))


def _real(xp: Namespace, y: Array) -> Array:
    return xp.real(y) if is_complex(y) else y


def flat(xp: Namespace, h: Array) -> Array:
    """(..., D, N) as (..., D N)."""
    return xp.reshape(h, (*h.shape[:-2], h.shape[-2] * h.shape[-1]))


# sequences


def length_of(plan: Plan) -> int:
    """Tokens of one scan of array calls."""
    return min(plan.chunk_size, TOKENS) if isinstance(plan.chunk_size, int) else TOKENS


def parts(plan: Plan, s: Sequence) -> list[tuple[int, int]]:
    """The tokens of a sequence, a few at a time."""
    T, step = s.stop - s.start, length_of(plan)
    return [(t, min(t + step, T)) for t in range(0, T, step)]


def each_sequence(plan: Plan, x: SelectiveInputs, state: Any) -> list[tuple[Sequence, SelectiveInputs, Array]]:
    """(sequence, its tokens, its initial state (..., D, N)) in the dtype of the computation."""
    xp, shape, found = plan.xp, (*x.x.shape[:-2], *x.channels), []
    x = SelectiveInputs(*(None if y is None else as_computed(xp, y, plan.dtype) for y in x[:5]))
    kind = complex_of(xp, plan.dtype) if x.is_complex else plan.dtype
    for s in plan.sequences:
        if state is None:
            h = xp.zeros(shape, dtype=kind, device=device(x.x))
        else:
            h = cast(xp, state if s.row is None else xp.broadcast_to(state[s.row, ...], shape), kind)
        found.append((s, x.tokens(s.start, s.stop), h))
    return found


def together(plan: Plan, x: SelectiveInputs, each: list[SelectiveInputs]) -> SelectiveInputs:
    """The gradients of all pieces: those of A add up, from the last piece of a sequence to the first."""
    if not each:
        return SelectiveInputs(*(None if y is None else plan.xp.zeros_like(y) for y in x[:5]))
    dA = None if x.A is None else sum((d.A for d in each[-2::-1]), each[-1].A)
    rows = {n: joined(plan, x.x, [getattr(d, n) for d in each]) for n in ("x", "dt", "B", "C")}
    return SelectiveInputs(**rows, A=dA)


# the choice of a backend


def reason(x: SelectiveInputs, plan: Plan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    if backend == "cuda":
        return kernels_reason(x, plan.xp, plan.dtype)
    return unsupported_reason(x, plan, backend)


def kernels_reason(x: SelectiveInputs, xp: Namespace, dtype: Any) -> str | None:
    """Why CUDA kernels do not compute a call; None if they do, and then steps, skip and gate too."""
    if not is_cupy(xp):
        return "it takes CuPy arrays"
    from ..cuda import selective

    return selective.unsupported_reason(x, xp, dtype)


def choose(fn: str, x: SelectiveInputs, plan: Plan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is not None:
        if (why := reason(x, plan, wanted)) is not None:
            raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {why}")
        return wanted
    for backend in ("cuda", "numba"):
        if reason(x, plan, backend) is None:
            return backend
    return "reference" if plan.chunk_size == 1 else "chunks"


register(Selective(), SelectiveInputs)
