"""chunk_size=1: prefill, prefill in pieces and decode have the same bits, forward and backward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from tests import cases
from tests.cases import draw, parts

CUTS = (0, 1, 2, 2, 7, 24, 25, 40)
FRAME = "states are in the frame of their last token, tokens of a call in that of its first"
WIDER = "in a call the state has more digits than between calls"
EXCEPT = {
    "retnet": FRAME,
    "transxssm": FRAME,
    "mamba3": FRAME,
    "mamba3_mimo": FRAME,
    "based": WIDER,
    "rebased": WIDER,
    "abc": WIDER,
}
OTHER_GRADIENTS = {
    "mesa_net": "they solve systems of transposed matrices, which are not symmetric to the bit",
    **dict.fromkeys(("preconditioned_gated_delta_rule", "preconditioned_kda"), "those of keys differ by rounding"),
    "rwkv4": "the gradient of the maximum m of a state is a sum in another order",
}
OTHER_STEPS = {
    la.performer,
    la.rfa,
    la.selective_scan,
}  # la.step computes features, or a channel's sum, in another order
CASES = [c for c in cases.PLAIN if c.fn.__name__ not in EXCEPT]
CASES += [c for c in cases.CASES if c.fn in (la.gla, la.rwkv6, la.gated_delta_rule, la.mlstm) and c not in CASES]


def cut(case, arrays, a, b):
    """The tokens a..b."""
    lead = {n: x.ndim - len(case.given[n].split()) for n, x in arrays.items() if n in case.given}
    return {n: x[(slice(None),) * lead[n] + (slice(a, b),)] if n in lead and case.on_tokens(n) else x
            for n, x in arrays.items()}  # fmt: skip


def assert_same_bits(a, b):
    for x, y in zip(parts(a), parts(b), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("backend", ["reference", "chunks", "numba"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_of_any_length_have_the_same_bits(case, backend):
    """Outputs, states, and gradients of tokens and of states, with the gradient handed from call to call."""
    if case.fn is la.block_scan and backend == "chunks":
        pytest.skip("array calls compute prefixes of products")
    arrays, state = draw(case, T=CUTS[-1], H=2, K=9, V=6, dtype=np.float32)
    how = {**case.options, "chunk_size": 1, "return_state": True, **cases.covered(case, [{"backend": backend}])[0]}
    (out, end), pullback = la.vjp(case.fn, **arrays, **how, state=state)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dend = cases.parts_like(end, [rng.standard_normal(x.shape).astype(x.dtype) for x in parts(end)])
    whole = pullback(dout, dend)

    S, outs, pulls = state, [], []
    for a, b in itertools.pairwise(CUTS):
        (y, S), pull = la.vjp(case.fn, **cut(case, arrays, a, b), **how, state=S)
        outs.append(y)
        pulls.append(pull)
    assert_same_bits(np.concatenate(outs, 1), out)
    assert_same_bits(S, end)
    if case.fn.__name__ in OTHER_GRADIENTS:
        return
    d, grads = dend, []
    for (a, b), pull in zip(reversed(list(itertools.pairwise(CUTS))), reversed(pulls), strict=True):
        grads.insert(0, pull(dout[:, a:b], d))
        d = grads[0].state
    assert_same_bits(d, whole.state)
    for name in filter(case.on_tokens, case.given):
        assert_same_bits(np.concatenate([getattr(g, name) for g in grads], 1), getattr(whole, name))


@pytest.mark.parametrize("case", [c for c in CASES if c.fn not in OTHER_STEPS], ids=str)
def test_a_step_has_the_bits_of_the_token_in_a_long_call(case):
    arrays, state = draw(case, T=5, H=2, K=9, V=6, dtype=np.float32)
    out, end = case.fn(**arrays, **case.options, chunk_size=1, state=state, return_state=True)
    S = state
    for t in range(5):
        token = {n: x[:, 0] if n in case.given and case.on_tokens(n) else x
                 for n, x in cut(case, arrays, t, t + 1).items()}  # fmt: skip
        y, S = la.step(case.fn, **token, **case.options, state=S, return_state=True)
        assert_same_bits(y, out[:, t])
    assert_same_bits(S, end)


@pytest.mark.parametrize("fn", [la.gated_delta_rule, la.kda, la.rwkv7, la.based], ids=lambda fn: fn.__name__)
def test_calls_in_float64_have_the_same_bits(fn):
    case = next(c for c in cases.PLAIN if c.fn is fn)
    arrays, state = draw(case, T=CUTS[-1], K=5, V=6)
    out = case.fn(**arrays, **case.options, chunk_size=1, state=state)
    outs = []
    for a, b in itertools.pairwise(CUTS):
        y, state = case.fn(**cut(case, arrays, a, b), **case.options, chunk_size=1, state=state, return_state=True)
        outs.append(y)
    assert_same_bits(np.concatenate(outs, 1), out)


def test_every_variant_has_these_bits_or_a_reason():
    known = {c.fn.__name__ for c in CASES} | EXCEPT.keys()
    assert {fn.__name__ for fn in cases.RECURRENT} == known
