"""Sequences: handed over, packed, batched, cut; the same bits whatever stands beside them; nothing from the future."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from tests.cases import CASES, PLAIN, call, cotangents, draw, pairwise, parts, parts_like, tokens, with_gradients, worst

pytest.importorskip("numba")

FORMS = (
    {"backend": "numba", "chunk_size": 1},
    {"backend": "chunks", "chunk_size": 4},
    {"backend": "numba", "chunk_size": 16},
    {"chunk_size": "parallel"},
    {},
)
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())) or "default")
causal_case = pytest.mark.parametrize("case", [c for c in CASES if c.causal], ids=str)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)


def pulled(case, arrays, state, dout, dstate, **options):
    """((out, state), gradients)."""
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, **options)
    return result, pullback(dout, dstate)


@every_form
@causal_case
def test_two_halves_are_the_whole(case, form):
    T, cut = 37, 21
    arrays, state = draw(case, T=T)
    dout, dstate = cotangents(call(case, arrays, state=state))
    (out, end), grads = pulled(case, arrays, state, dout, dstate, **form)
    first, second = tokens(case, arrays, 0, cut), tokens(case, arrays, cut, T)
    mid = call(case, first, state=state, **form)[1]
    (out2, end2), grads2 = pulled(case, second, mid, dout[:, cut:], dstate, **form)
    (out1, _), grads1 = pulled(case, first, state, dout[:, :cut], grads2.state, **form)
    found = {"out": np.concatenate([out1, out2], axis=1)}
    expected = {"out": out}
    for n, (a, b) in enumerate(zip(parts(end2), parts(end), strict=True)):
        found[f"state {n}"], expected[f"state {n}"] = a, b
    for n, (a, b) in enumerate(zip(parts(grads1.state), parts(grads.state), strict=True)):
        found[f"dstate {n}"], expected[f"dstate {n}"] = a, b
    for name in case.given:
        a, b = getattr(grads1, name), getattr(grads2, name)
        found[name] = np.concatenate([a, b], axis=1) if case.on_tokens(name) else a + b
        expected[name] = getattr(grads, name)
    error, what = worst(found, expected)
    assert error <= 1e-12, (what, error)


# offsets with an empty sequence first, between and last, and sequences of one token
OFFSETS = [0, 0, 1, 1, 18, 20, 37, 37]


def row(x, n):
    """Row n of a state, as the state of a batch of one."""
    return parts_like(x, [S[n : n + 1] for S in parts(x)])


@every_form
@every_case
def test_packed_sequences_are_one_by_one_to_the_bit(case, form):
    check_packed(case, form, (1,))


@pytest.mark.parametrize(("case", "form", "B"), pairwise(PLAIN, [{}, {"backend": "chunks"}], [(), (1, 1)]), ids=str)
def test_packed_sequences_without_a_batch_axis_and_with_two(case, form, B):
    check_packed(case, form, B)


def check_packed(case, form, B):
    N = len(OFFSETS) - 1
    arrays, states = draw(case, T=OFFSETS[-1], B=B, N=N)
    options = {"cu_seqlens": np.array(OFFSETS), **form}
    dout, dstate = cotangents(call(case, arrays, state=states, **options))
    (out, end), grads = pulled(case, arrays, states, dout, dstate, **options)
    packed, totals = out.reshape(-1, *out.shape[out.ndim - case.spec.row_axes :]), {}
    dpacked = dout.reshape(packed.shape)
    for n, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        alone = {
            x: y.reshape(1, *y.shape[len(B) :]) if x in case.given and case.on_tokens(x) else y
            for x, y in tokens(case, arrays, a, b).items()
        }
        (out1, end1), grads1 = pulled(case, alone, row(states, n), dpacked[None, a:b], row(dstate, n), **form)
        np.testing.assert_array_equal(packed[a:b], out1[0])
        mine = parts(row(end, n)) + parts(row(grads.state, n))
        for x, y in zip(mine, parts(end1) + parts(grads1.state), strict=True):
            np.testing.assert_array_equal(x, y)
        for name in case.given:
            d, d1 = getattr(grads, name), getattr(grads1, name)
            if case.on_tokens(name):
                np.testing.assert_array_equal(d.reshape(-1, *d.shape[len(B) + 1 :])[a:b], d1[0], name)
            else:
                totals[name] = totals.get(name, 0) + d1
    error, what = worst({n: getattr(grads, n) for n in totals}, totals)
    assert error <= 1e-13, (what, error)


EMPTY = (None, [0, 0], [0, 0, 0], [0, 0, 3, 3])


@pytest.mark.parametrize(
    ("case", "backend", "offsets"), pairwise(CASES, ["reference", "chunks", "numba", None], EMPTY), ids=str
)
def test_an_empty_sequence_hands_its_state_over(case, backend, offsets):
    """Forward and backward, also where there is no token at all."""
    stabilised = case.spec.state.parts is la.StabilisedState
    rounding = 2e-6 if stabilised else 0  # dm is the small difference of products S dS that cancel
    T, N = (offsets[-1], len(offsets) - 1) if offsets else (0, None)
    arrays, state = draw(case, T=T, B=(1,), N=N, dtype=np.float32)
    options = {"backend": backend} | ({} if offsets is None else {"cu_seqlens": np.array(offsets)})
    dout, dstate = cotangents(call(case, arrays, state=state, **options))
    empty = [n for n in range(len(offsets) - 1) if offsets[n] == offsets[n + 1]] if offsets else [0]
    for d in ((dout, dstate), (None, dstate)):
        (_, end), grads = pulled(case, arrays, state, *d, **options)
        for found, given in ((end, state), (grads.state, dstate)):
            for x, y in zip(parts(found), parts(given), strict=True):
                if found is end or y.dtype.kind == "f":  # a number of tokens has no gradient
                    np.testing.assert_allclose(x[empty], y[empty], rtol=1e-6, atol=rounding)
        for name in case.given:
            assert getattr(grads, name).shape == arrays[name].shape


@every_form
@every_case
def test_the_same_bits_alone_in_a_batch_and_again(case, form):
    arrays, state = draw(case, T=33, B=(3,), H=3)
    whole = with_gradients(case, arrays, state=state, **form)
    again = with_gradients(case, arrays, state=state, **form)
    dout, dstate = cotangents(call(case, arrays, state=state))
    alone = {n: x[1:2] if n in case.given and case.on_tokens(n) else x for n, x in arrays.items()}
    (out, end), grads = pulled(case, alone, row(state, 1), dout[1:2], row(dstate, 1), **form)
    for name, x in whole.items():
        np.testing.assert_array_equal(x, again[name], name)
    np.testing.assert_array_equal(whole["out"][1:2], out)
    for name in case.given:
        if case.on_tokens(name):
            np.testing.assert_array_equal(whole["d" + name][1:2], getattr(grads, name), name)
    ends = [x[1:2] for n, x in whole.items() if n.startswith(("state", "dstate"))]
    for x, y in zip(ends, [*parts(end), *parts(grads.state)], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("case", "form", "size"), pairwise([c for c in CASES if c.causal], FORMS, ["a little", "very much"]), ids=str
)
def test_no_later_token_changes_an_earlier_output(case, form, size):
    arrays, state = draw(case, T=37)
    out = call(case, arrays, state=state, **form)[0]
    rng = np.random.default_rng(7)
    for t in (1, 15, 16, 20, 36):
        changed = {}
        for name, x in arrays.items():
            changed[name] = x
            if name in case.given and case.on_tokens(name):
                changed[name] = x.copy()
                gate = case.fn.samples.distribution(name) in (
                    "log decay",
                    "factor",
                    "strength",
                    "positive",
                    "share",
                    "logit",
                    "step",
                )
                squares = case.squares  # of keys, which are multiplied by each other
                large = 1.0 if size == "a little" or gate else 1e3 if squares else 1e30  # short of overflow
                longer = case.spec.micro_steps or case.maps or case.learns  # products
                large = min(large, 10.0) if longer else large
                changed[name][:, t:] *= large * rng.uniform(0.5, 1.5, x[:, t:].shape)
        moved = call(case, changed, state=state, **form)[0]
        np.testing.assert_array_equal(moved[:, :t], out[:, :t])
        assert not np.array_equal(moved[:, t], out[:, t])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@every_form
@every_variant
def test_nan_and_inf_stay_in_their_head_and_sequence(case, form, poison):
    arrays, state = draw(case, T=20, B=(2,), H=3)
    expected = with_gradients(case, arrays, state=state, **form)
    arrays[case.spec.change.value] = arrays[case.spec.change.value].copy()
    np.moveaxis(arrays[case.spec.change.value], case.heads(case.spec.change.value), 0)[2, 1, 9] = poison
    with np.errstate(all="ignore"):
        found = with_gradients(case, arrays, state=state, **form)
    assert not np.isfinite(found["out"][1, 9, 2]).any()
    S = next(name for name in found if name.startswith("state"))
    held = found[S][1, 2]
    if case.spec.readout.name == "LEVELS":  # one of them
        held = held[~np.isfinite(held).all(axis=(-2, -1))]
        assert len(held) == 1
    assert not np.isfinite(held).any()
    axes = {"out": -2} | {"d" + n: case.heads(n) for n in case.given if case.on_tokens(n) and case.has_heads(n)}
    for name, axis in axes.items():
        np.testing.assert_array_equal(found[name][0], expected[name][0], name)
        two, wanted = (np.moveaxis(x[name][1], axis, 0)[:2] for x in (found, expected))
        np.testing.assert_array_equal(two, wanted, name)
    for name in (n for n in found if "state" in n and found[n].ndim > 1):
        np.testing.assert_array_equal(found[name][1, :2], expected[name][1, :2], name)
