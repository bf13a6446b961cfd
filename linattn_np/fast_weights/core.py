"""The fast-weights core: the functions of the protocol `linattn_np/core.py:Core`.

    W_t = W_{t-1} - eta_t dl(f_W(k_t), v_t) / dW,   out_t = f_{W_t}(q_t)

with the models, losses and optimisers of `types.Learner`. The state is what the weights have learnt (states.py). Each
variant has a core of its own: its learner, and the type of its state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from ..core import Computation, Computed, Core, Explained, register, register_states
from ..ops.host import has_compiler
from ..ops.sums import sum_to
from ..runtime.arrays import Array, is_cupy, is_numpy
from ..runtime.recorder import refuse
from ..runtime.shapes import Sizes
from . import definition
from .array import chunks
from .losses import LOSSES
from .recorded import added, difference, zeros_like
from .recorded import each as of_each
from .sequences import Call, scaled
from .states import axes_of
from .types import Adam, FastPlan, Inputs, Learner

BACKENDS = ("reference", "chunks", "numba", "cuda")
LARGEST = 2**18  # numbers of a layer's matrix in compiled loops


class Residuals(NamedTuple):
    """Residuals of a forward pass. states: of each part before its tiles, if none was given at first."""

    x: Inputs
    plan: FastPlan
    backend: str
    state: Any
    states: Any


class Learning(Computation):
    """The computation of every learner."""

    def forward(self, fn: str, x: Inputs, plan: FastPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        if state is not None and plan.learner.window > 1 and state.k_past.shape[-2] != plan.learner.window - 1:
            shape = tuple(state.k_past.shape)
            raise ValueError(
                f"{fn}: state.k_past has shape {shape}, expected C = window - 1 = {plan.learner.window - 1}"
            )
        backend, outs, ends, before = choose(fn, x, plan, wanted), [], [], list[Any]()
        if backend in ("reference", "chunks"):
            refuse("BLAS computes products")
        call = Call(plan, x, state, is_cast(backend))
        stores_states = state is None and plan.gradients
        has_end = plan.returns_state or x.q is None or plan.learner.every == "token"
        for part in call.parts:
            tokens, begin = _tokens(call, part), call.begin(part)
            given = plan.learner, plan.xp, tokens, begin, call.initial(part), call.slow
            out, states = module_of(backend, plan.learner).forward(*given, stores_states, has_end)
            outs.append(zeros_like(plan.xp, tokens.v) if out is None else out)
            ends.append(call.end(part, states[-1]) if has_end else [])
            before.append((*states,))
        out = None if x.q is None else scaled(plan, call.left(call.joined(outs)))
        end = call.gathered(ends) if has_end else None
        return out, end, Residuals(x, plan, backend, state, (*before,) if stores_states else None)

    def backward(self, residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, before = residuals
        f, xp, module = plan.learner, plan.xp, module_of(backend, plan.learner)
        call = Call(plan, x, state, is_cast(backend))
        found, begins, has_end = [], [], dstate is not None or plan.learner.every == "token"
        dweights, dslow = list[Any](), list[Any]()
        for n, part in enumerate(call.parts):
            tokens, initial = _tokens(call, part), call.initial(part)
            given = f, xp, tokens
            states = (
                before[n] if before else module.forward(*given, call.begin(part), initial, call.slow, True, has_end)[1]
            )
            dend, d = call.gradient_of_end(part, dstate), call.entered_gradient(dout, part)
            dx, dbegin, dinitial, more = module.backward(*given, states, initial, call.slow, d, dend, has_end)
            found.append(dx)
            if call.begins_anew(part):
                zero = of_each(zeros_like, xp, dbegin.anchor)
                dbegin = dbegin._replace(weights=of_each(added, xp, dbegin.weights, dbegin.anchor), anchor=zero)
            if state is not None:
                begins.append(call.parts_of(dbegin._replace(n=0)))
            own = of_each(added, xp, dbegin.anchor, dbegin.weights)
            own = of_each(added, xp, dinitial, own) if dinitial else own
            if dstate is not None:  # a state is W - W_0
                own = of_each(difference, xp, own, of_each(added, xp, dend.anchor, dend.weights))
            dweights.append([sum_to(xp, y, y.shape[1:]) for y in own])
            dslow += [[sum_to(xp, y, y.shape[1:]) if y.ndim == 4 else y for y in more]] if more else []
        dslow = dslow or [of_each(zeros_like, xp, call.slow)]
        each = (functools.reduce(functools.partial(of_each, added, xp), trees) for trees in (dweights, dslow))
        return call.gradients(found, *each), call.gathered(begins) if begins else None

    def explain(self, fn: str, x: Inputs, plan: FastPlan, wanted: str | None) -> Explained:
        """The products with each matrix: of key, query and update, and of the cotangents of all but the first."""
        chosen, f = choose(fn, x, plan, wanted), plan.learner
        matrices = [w for w in x.weights if len(w.shape) == 3]
        each = 2.0 * sum(prod(w.shape[1:]) * (3 + (n > 0)) for n, w in enumerate(matrices))
        reason = "requested" if wanted else "the default path" if f.is_linear else "its steps are not sums of gradients"
        others = {n: unsupported_reason(x, plan, n) or "covers the call too" for n in BACKENDS if n != chosen}
        C = None if chosen == "reference" else f.mini_batch
        form = "recurrent form" if C is None else "dual form" if f.is_linear else "chunk form"
        return Explained(chosen, reason, others, form, C, each * prod(x.v.shape[:-1]), each)


def _tokens(call: Call, part: Any) -> Any:
    return call.tokens.each(lambda y: call.cut(y, part))


class FastWeights(Learning, Core):
    """A learner: its options, and the type of its state."""

    BACKENDS = BACKENDS
    STATE_COUNTS = ("length",)
    NO_SUMMARY = "weights learn by steps that are not linear in them"

    def __init__(
        self, learner: Callable[[Mapping[str, Any]], Learner], state: type[Any], axes: Mapping[str, str] | None = None
    ) -> None:
        """learner: from the options of a call. axes: of the parts of the state, unless states.py has them."""
        self.learner, self.kind, self.STATE_AXES = learner, state, axes or axes_of(state)
        register_states(self, state)

    def plan(self, fields: dict[str, Any], spec: Any, options: Mapping[str, Any], sizes: Sizes) -> FastPlan:
        """The plan of a call, with its learner."""
        tile = C if isinstance(C := fields["chunk_size"], int) else None
        learner, axes = self.learner(options)._replace(tile=tile), tuple(self.STATE_AXES.values())
        return FastPlan(**fields, learner=learner, kind=self.kind, axes=axes)


def module_of(backend: str, f: Learner) -> Any:
    """The functions of a backend."""
    if backend == "numba":
        from .cpu import calls

        return calls
    if backend == "cuda":
        from .cuda import linear, momentum

        return linear if f.normed else momentum
    return {"reference": definition, "chunks": chunks}[backend]


def is_cast(backend: str) -> bool:
    """Whether a backend wants tokens in the compute dtype; `cuda` gets the caller's."""
    return backend != "cuda"


def unsupported_reason(x: Inputs, plan: FastPlan, backend: str) -> str | None:
    """Why a backend does not compute a call; None if it does."""
    f = plan.learner
    if backend != "reference" and not f.is_linear and (f.decayed or isinstance(f.optimiser, Adam)):
        return "the weights of a token are no sum of gradients, nor of directions that depend on sums of them"
    if backend == "numba" and not f.is_linear:
        return "the weights of a token are no sum of gradients"
    if backend != "reference" and not isinstance(f.model, str):
        return "the model is a function of the caller"
    if backend == "cuda":
        return module_of(backend, f).unsupported_reason(x, plan) if is_cupy(plan.xp) else "it takes CuPy arrays"
    if backend != "numba":
        return None
    if not is_numpy(plan.xp):
        return "it takes NumPy arrays"
    if f.model not in ("linear", "mlp") or f.every != "token" or f.loss not in list(LOSSES) or f.renormed:
        return "it has linear models and MLPs with a step at every token; array calls have large products"
    if f.model == "mlp" and (len(x.rates.eta) > 1 or prod(x.weights[0].shape[1:]) > LARGEST):
        return "its MLPs have one step size and matrices that lie in a cache"
    return None if has_compiler() else "Numba, the compiler of its loops, is not installed"


def choose(fn: str, x: Inputs, plan: FastPlan, wanted: str | None) -> str:
    """The backend of a call.   Raises ValueError if the one that is wanted does not compute it."""
    if wanted is not None:
        if (reason := unsupported_reason(x, plan, wanted)) is not None:
            raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
        return wanted
    fast = ("cuda", "numba", "chunks") if plan.chunk_size != 1 else ()
    return next((name for name in fast if unsupported_reason(x, plan, name) is None), "reference")


register(Learning(), Inputs)
