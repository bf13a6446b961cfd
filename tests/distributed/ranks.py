"""A call whose tokens are dealt out to ranks, and its result and gradients put together again."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import linattn_np as la
from linattn_np.distributed import in_threads, run
from linattn_np.testing import relative_error
from tests.cases import Case, draw, parts, parts_like


def drawn(case: Case, T: int, **sizes: Any) -> tuple[dict[str, Any], Any]:
    """(arrays, state)."""
    return draw(case, T=T, **sizes)


def axis(case: Case, name: str, x: Any) -> int | None:
    """The axis of tokens."""
    return x.ndim - len(case.given[name].split()) if name in case.given and case.on_tokens(name) else None


def cut(case: Case, arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The tokens start ... stop."""
    at = {n: axis(case, n, x) for n, x in arrays.items()}
    return {n: x if at[n] is None else x[(slice(None),) * at[n] + (slice(start, stop),)] for n, x in arrays.items()}


def cotangents(case: Case, arrays: dict[str, Any], state: Any, **options: Any) -> tuple[Any, Any]:
    """Random gradients of the outputs and the final state."""
    out, end = case.fn(**arrays, **case.options, **options, state=state, return_state=True)
    rng = np.random.default_rng(5)
    return rng.standard_normal(out.shape).astype(out.dtype), parts_like(
        end, [rng.standard_normal(S.shape).astype(S.dtype) for S in parts(end)]
    )


def on_one(case: Case, arrays: dict[str, Any], state: Any, d: tuple[Any, Any], **options: Any) -> dict[str, Any]:
    """Results and gradients of a call without ranks."""
    (out, end), pullback = la.vjp(case.fn, **arrays, **case.options, **options, state=state, return_state=True)
    return {"out": out, "end": end} | pullback(*d)._asdict()


def on_ranks(case: Case, arrays: dict[str, Any], state: Any, d: tuple[Any, Any], lengths: list[int], comms: Any = None,
             **options: Any) -> dict[str, Any]:  # fmt: skip
    """The same of ranks that have so many tokens each."""
    bounds = [0, *itertools.accumulate(lengths)]
    dout, dstate = d
    time = dout.ndim - 1 - case.spec.row_axes

    def work(comm: Any) -> tuple[Any, Any, dict[str, Any]]:
        start, stop = bounds[comm.rank : comm.rank + 2]
        own = cut(case, arrays, start, stop)
        (out, end), pullback = la.vjp(run, case.fn, **own, **case.options, **options, comm=comm, lengths=lengths,
                                      state=state, return_state=True)  # fmt: skip
        plain = run(case.fn, **own, **case.options, **options, comm=comm, lengths=lengths, state=state)
        assert np.array_equal(plain, out)
        return out, end, pullback(dout[(slice(None),) * time + (slice(start, stop),)], dstate)._asdict()

    each = in_threads(len(lengths), work, timeout=30.0)
    joined = {"out": np.concatenate([out for out, _, _ in each], time), "end": each[0][1]}
    for name, x in arrays.items():
        own, at = [grads[name] for *_, grads in each], axis(case, name, x)
        if own[0] is not None:
            joined[name] = sum(own) if at is None else np.concatenate(own, at)
    for _, end, grads in each:
        assert all(map(np.array_equal, parts(end), parts(each[0][1])))
        if state is not None:
            assert all(map(np.array_equal, parts(grads["state"]), parts(each[0][2]["state"])))
    return joined | {"state": each[0][2]["state"]}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-11) -> None:
    for name, x in found.items():
        if x is None:
            assert wanted[name] is None
            continue
        for a, b in zip(parts(x), parts(wanted[name]), strict=True):
            assert relative_error(a, b) < bound, name


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, x in found.items():
        for a, b in zip([] if x is None else parts(x), [] if x is None else parts(wanted[name]), strict=True):
            assert np.array_equal(a, b), name
