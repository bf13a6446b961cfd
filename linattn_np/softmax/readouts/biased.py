"""Softmax attention with a number added to the logit of each pair of a query and a key.

    p_tj = e^{scale q_t . k_j + bias_tj} / (e^{sink} + sum_i e^{scale q_t . k_i + bias_ti})

The slots of a cache are keys like the tokens: they precede them, and keys that a query does not read (later tokens,
empty slots, tokens outside its window) have a bias of -inf. Sequences of a ragged batch are calls of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core import Computed, Explained, register
from ...runtime.arrays import Array, Namespace, cast, device
from ...runtime.shapes import Sequence
from .. import cache, sequences
from ..core import CORE, choose, module_of
from ..lse import apart, with_lse
from ..states import GivesStates, ends, needs_end, with_state
from ..types import Inputs, KeyValueCache, SoftmaxPlan


class BiasedInputs(NamedTuple):
    """Arrays of a call, or their gradients; tokens before heads."""

    q: Array  # (..., Tq, Hq, K), None: nothing is read
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    sinks: Array  # (Hq,)
    bias: Array  # (..., Tq, Hq, T)


class BiasedResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: Inputs
    plan: SoftmaxPlan
    backend: str
    state: Any
    results: list[Any]  # (out, logs) of each sequence


class Biased(GivesStates):
    """The core's loops and array calls, with a bias."""

    def forward(self, fn: str, x: BiasedInputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        backend, given = choose(fn, x, plan, wanted), core_inputs(x)
        results = [] if x.q is None else [_forward(backend, *one[2:]) for one in each_sequence(plan, given, state)]
        out: Array = None
        if x.q is not None:
            out = results[0][0] if len(results) == 1 else plan.xp.concat([y for y, _ in results], axis=-3)
        end = ends(plan, given, state) if needs_end(plan, x) else None
        found = out if out is None else with_lse(plan, given, out, _logs(results))
        return found, end, BiasedResiduals(given, plan, backend, state, results)

    def backward(self, residuals: BiasedResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, results = residuals
        dout, dlse = apart(plan, dout)
        if dout is None or x.q is None:
            found = [sequences.zeros(plan, own, row) for _, own, row in sequences.each_sequence(plan, x, state)]
        else:
            found = []
            for (s, row, own_plan, own), result in zip(each_sequence(plan, x, state), results, strict=True):
                place = (..., slice(None) if s.row is None else slice(s.start, s.stop), slice(None), slice(None))
                d = dout[place], None if dlse is None else dlse[place]
                found.append(_apart(plan, x, s, row, _backward(backend, own_plan, own, result, d)))
        d = sequences.gathered(plan, x, found)
        dx, dbegin = d if dstate is None else with_state(plan, x, state, dstate, d)
        return BiasedInputs(dx.q, dx.k, dx.v, dx.sinks, dx.bias), dbegin

    def reads_out(self, residuals: BiasedResiduals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: BiasedInputs, plan: SoftmaxPlan, wanted: str | None) -> Explained:
        """As the core."""
        return CORE.explain(fn, core_inputs(x), plan, wanted, of=x)


def each_sequence(plan: SoftmaxPlan, x: Inputs, state: Any) -> Iterator[tuple[Sequence, Any, SoftmaxPlan, Inputs]]:
    """(sequence, its cache, plan and inputs of a separate call without a cache)."""
    for s, own, row in sequences.each_sequence(plan, x, state):
        T, L = own.v.shape[-3], 0 if row is None else row.v.shape[-3]
        if s.row is not None:
            bias = plan.xp.concat([own.bias[..., :L], own.bias[..., L + s.start : L + s.stop]], axis=-1)
            own = own._replace(bias=bias)
        alone = plan._replace(sequences=(Sequence(None, 0, T),))
        if row is None:
            yield s, row, alone, own
            continue
        k, v = (plan.xp.concat([getattr(row, n), cast(plan.xp, getattr(own, n), plan.dtype)], axis=-3) for n in "kv")
        bias = cast(plan.xp, own.bias, plan.dtype) + hidden(plan, row, T, own.bias.shape[-3])
        alone = alone._replace(causal=False, window=None, sequences=(Sequence(None, 0, L + T),))
        yield s, row, alone, own._replace(k=k, v=v, bias=bias)


def hidden(plan: SoftmaxPlan, row: KeyValueCache, T: int, queries: int) -> Array:
    """-inf where a query does not read a slot or a token, else 0: (..., queries, 1, L + T)."""
    xp, n = plan.xp, cache.count(plan.xp, row.length)
    p = cache.positions(xp, n, row.v.shape[-3])
    tokens = n[..., None] + xp.arange(T, dtype=n.dtype, device=device(n))
    keys = xp.concat([p, tokens], axis=-1)[..., None, None, :]
    read = keys >= 0
    if plan.causal:
        age = tokens[..., None, None] - keys
        read = xp.logical_and(read, age >= 0)
        if plan.window is not None:
            read = xp.logical_and(read, age < plan.window)
    zero = xp.zeros(read.shape, dtype=plan.dtype, device=device(n))
    return xp.where(read, zero, xp.full_like(zero, -xp.inf))


def _forward(backend: str, plan: SoftmaxPlan, x: Inputs) -> tuple[Array, Any]:
    """(out, logs) of one sequence."""
    if backend == "numba":
        from ..cpu import calls

        return calls.forward(plan, x, None)
    return sequences.forward(module_of(backend, x), plan, x, None)


def _logs(results: list[Any]) -> Any:
    """The logs of all sequences: one array of compiled loops, or a list."""
    if isinstance(results[0][1], list):
        return [log for _, logs in results for log in logs]
    return np.concatenate([logs for _, logs in results], axis=-3)


def _backward(backend: str, plan: SoftmaxPlan, x: Inputs, result: tuple[Array, Any], d: tuple[Array, Any]) -> Inputs:
    """Gradients of one sequence; d: of out and of lse."""
    if backend == "numba":
        from ..cpu import calls

        return calls.backward(plan, x, None, result, *d)[0]
    return sequences.backward(module_of(backend, x), plan, x, None, result, *d)[0]


def _apart(plan: SoftmaxPlan, x: Inputs, s: Sequence, row: Any, d: Inputs) -> tuple[Inputs, Any]:
    """(gradients of the tokens and of all columns of their bias, gradient of the cache)."""
    L = 0 if row is None else row.v.shape[-3]
    bias = d.bias
    if s.row is not None:
        rest = [_zeros(plan.xp, bias, n) for n in (s.start, x.v.shape[-3] - s.stop)]
        bias = plan.xp.concat([bias[..., :L], rest[0], bias[..., L:], rest[1]], axis=-1)
    dx = d._replace(k=d.k[..., L:, :, :], v=d.v[..., L:, :, :], bias=bias)
    if row is None:
        return dx, None
    return dx, KeyValueCache(d.k[..., :L, :, :], d.v[..., :L, :, :], plan.xp.zeros_like(row.length))


def _zeros(xp: Namespace, like: Array, columns: int) -> Array:
    return xp.zeros((*like.shape[:-1], columns), dtype=like.dtype, device=device(like))


def core_inputs(x: BiasedInputs) -> Inputs:
    """In the core's type."""
    return Inputs(x.q, x.k, x.v, sinks=x.sinks, bias=x.bias)


register(Biased(), BiasedInputs)
