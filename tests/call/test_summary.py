"""Summaries of spans: of every variant whose states compose, the pieces equal the whole, gradients too."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.core import Elementwise
from linattn_np.testing import relative_error
from tests import cases
from tests.cases import draw, kind_like, parts, parts_like

CASES, PLAIN = cases.SPANS, [cases.plain_case(fn) for fn in cases.COMPOSING]
CUTS = (0, 4, 4, 9, 11)


def tokens(case, arrays, start, stop):
    """The tokens start..stop of the arrays, without queries."""
    lead = {n: x.ndim - len(case.given[n].split()) for n, x in arrays.items() if n in case.given}
    cut = {n: x[(slice(None),) * lead[n] + (slice(start, stop),)] if n in lead and case.on_tokens(n) else x
           for n, x in arrays.items()}  # fmt: skip
    return cut | ({} if case.spec.change.query is None else {case.spec.change.query: None})


def drawn(case, **sizes):
    arrays, state = draw(case, T=CUTS[-1], **sizes)
    return arrays, state


def spans(case, arrays):
    return [tokens(case, arrays, a, b) for a, b in itertools.pairwise(CUTS)]


def assert_same(a, b, bound=1e-12):
    for x, y in zip(parts(a), parts(b), strict=True):
        assert relative_error(x, y) < bound


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_between_spans_are_those_of_a_call_that_goes_through(case):
    arrays, state = drawn(case)
    found = [la.summary(case.fn, **span, **case.options) for span in spans(case, arrays)]
    states = la.entry_states(found, state)
    assert len(states) == len(CUTS)
    for stop, S in zip(CUTS, states, strict=True):
        through = case.fn(**tokens(case, arrays, 0, stop), **case.options, state=state, return_state=True).state
        assert_same(S, through)
    assert_same(la.entry_states(found)[-1], case.fn(**tokens(case, arrays, 0, CUTS[-1]), **case.options,
                                                   return_state=True).state)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_composed_spans_are_the_summary_of_the_whole(case):
    arrays, _ = drawn(case)
    one, *rest = [la.summary(case.fn, **span, **case.options) for span in spans(case, arrays)]
    for span in rest:
        one = la.compose(one, span)
    whole = la.summary(case.fn, **tokens(case, arrays, 0, CUTS[-1]), **case.options)
    assert type(whole.transfer) is type(one.transfer)
    assert_same(one, whole)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradients_through_summaries_are_those_of_the_whole(case):
    """Of arrays and initial state, from a gradient of the final state and one of the state before the third span."""
    arrays, state = drawn(case)
    given = spans(case, arrays)
    pairs = [la.vjp(la.summary, case.fn, **span, **case.options) for span in given]
    states, back = la.vjp(la.entry_states, [s for s, _ in pairs], state)
    rng = np.random.default_rng(3)
    d = [parts_like(S, [rng.standard_normal(y.shape) for y in parts(S)]) for S in states]
    dspans, dstate = back((None, None, d[2], None, d[4]))
    grads = [pull(*each) for (_, pull), each in zip(pairs, dspans, strict=True)]

    at = CUTS[2]
    (_, middle), first = la.vjp(case.fn, **tokens(case, arrays, 0, at), **case.options, state=state, return_state=True)
    _, second = la.vjp(case.fn, **tokens(case, arrays, at, CUTS[-1]), **case.options, state=middle, return_state=True)
    of_second = second(None, d[4])
    of_first = first(
        None, parts_like(middle, [a + b for a, b in zip(parts(d[2]), parts(of_second.state), strict=True)])
    )
    assert_same(dstate, of_first.state, 1e-11)
    for name in case.given:
        if name == case.spec.change.query:
            assert all(getattr(g, name) is None for g in grads)
            continue
        each, wanted = [getattr(g, name) for g in grads], [getattr(of_first, name), getattr(of_second, name)]
        axis = arrays[name].ndim - len(case.given[name].split())
        if case.on_tokens(name):
            assert_same(np.concatenate(each, axis), np.concatenate(wanted, axis), 1e-11)
        else:
            assert_same(sum(each), sum(wanted), 1e-11)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradients_of_a_composition_are_central_differences(case):
    arrays, _ = drawn(case, B=())
    left, right = (la.summary(case.fn, **tokens(case, arrays, a, b), **case.options) for a, b in ((0, 5), (5, 11)))
    whole, pullback = la.vjp(la.compose, left, right)
    rng = np.random.default_rng(5)

    def flat(x):
        return parts(x) if x is not None else []

    d = [rng.standard_normal(x.shape) for x in flat(whole)]
    like = lambda x, each: parts_of(x, iter(each))  # noqa: E731
    dleft, dright = pullback(like(whole, d))
    for n, (span, dspan) in enumerate(((left, dleft), (right, dright))):
        direction = [rng.standard_normal(x.shape) for x in flat(span)]
        ends = []
        for step in (1e-6, -1e-6):
            moved = like(span, [x + step * y for x, y in zip(flat(span), direction, strict=True)])
            ends.append(flat(la.compose(*((moved, right) if n == 0 else (left, moved)))))
        numeric = sum(((a - b) / 2e-6 * y).sum().real for a, b, y in zip(*ends, d, strict=True))
        exact = sum((x * y).sum().real for x, y in zip(flat(dspan), direction, strict=True))
        assert abs(numeric - exact) < 1e-7 * max(1.0, abs(exact))


def parts_of(x, each):
    """x with other arrays, None where it has none."""
    if x is None:
        return None
    return type(x)(*(parts_of(y, each) for y in x)) if isinstance(x, tuple) else next(each)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_ragged_batch_has_a_summary_a_sequence(case):
    arrays, _ = drawn(case, B=(1,))
    whole, pullback = la.vjp(la.summary, case.fn, **tokens(case, arrays, 0, CUTS[-1]), **case.options, cu_seqlens=CUTS)
    d = parts_of(whole, (np.random.default_rng(7).standard_normal(x.shape) for x in parts(whole)))
    grads = pullback(*d)
    each = []
    for n, span in enumerate(spans(case, arrays)):
        one, pull = la.vjp(la.summary, case.fn, **span, **case.options)
        assert_same(parts_of(whole, (x[n : n + 1] for x in parts(whole))), one)
        each.append(pull(*parts_of(d, (x[n : n + 1] for x in parts(d)))))
    for name in (n for n in case.given if n != case.spec.change.query):
        own = [getattr(g, name) for g in each]
        joined = np.concatenate(own, 1) if case.on_tokens(name) else sum(own)
        assert_same(getattr(grads, name), joined, 1e-11)


@pytest.mark.parametrize("fn", cases.COMPOSING, ids=lambda fn: fn.__name__)
def test_a_transfer_is_no_larger_than_the_variant_needs(fn):
    """A matrix only where a token mixes channels; log decays of head or channels; nothing without a decay."""
    case = next(c for c in PLAIN if c.fn is fn)
    arrays, _ = drawn(case)
    found = la.summary(fn, **tokens(case, arrays, 0, 5), **case.options)
    S, transfer = parts(found.offset)[0], found.transfer
    if fn.spec.state.stacks:
        D = 2 * S.shape[-2] if isinstance(found.offset, tuple) else S.shape[-1]
        assert transfer.matrix.shape == (*S.shape[: -2 if isinstance(found.offset, tuple) else -1], D, D)
    elif isinstance(fn.spec.core, Elementwise):
        assert parts(transfer)[0].shape == S.shape
    elif fn.spec.state.first_weight is not None:
        assert transfer.matrix.shape == (*S.shape[:-1], S.shape[-2])
        assert transfer.weight.shape == transfer.retained.shape == S.shape[:-2]
    elif fn.spec.erase.name != "NONE" or fn.spec.state.rotates:
        assert transfer.shape == (*S.shape[:-1], S.shape[-2])
    elif fn.spec.decay.name == "NONE" or fn is la.abc:
        assert transfer is None
    elif fn.spec.decay.name == "SCALAR" or fn is la.retention:
        assert transfer.shape in (S.shape[:-2], S.shape[:-1])
    elif "gv" in case.given:
        assert (transfer.keys.shape, transfer.values.shape) == (S.shape[:-1], (*S.shape[:-2], S.shape[-1]))
    else:
        assert transfer.shape == S.shape[:-1]


@pytest.mark.parametrize("fn", cases.COMPOSING, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("how", [{"backend": "reference"}, {"backend": "chunks"}, {"layout": "heads_first"}], ids=str)
def test_every_backend_and_layout(fn, how):
    case = next(c for c in PLAIN if c.fn is fn)
    arrays, _ = drawn(case)
    given = tokens(case, arrays, 0, CUTS[-1])
    wanted, _ = la.vjp(la.summary, fn, **given, **case.options)
    if "layout" in how and fn.spec.row_axes == 2:  # heads
        given = {n: x if x is None or not case.on_tokens(n) else np.moveaxis(x, x.ndim + case.heads(n), 1)
                 for n, x in given.items()}  # fmt: skip
    found, pullback = la.vjp(la.summary, fn, **given, **case.options, **how)
    assert_same(found, wanted)
    for name, d in pullback(*found)._asdict().items():
        assert d is None or d.shape == given[name].shape


REASONS = {  # of every variant without a summary; those of a core are one
    "log_linear_gla": "levels are places of tokens", "log_linear_gated_delta_rule": "levels are places of tokens",
    "preconditioned_gated_delta_rule": "not linear in the state", "preconditioned_kda": "not linear in the state",
    "titans_linear": "a span alone does not know its own",
    **{fn.__name__: "keeps a row of every token" for fn in cases.GROWING},
    **dict.fromkeys(("atlas", "lact", "titans", "ttt_linear", "ttt_mlp"), "not linear in them"),
}  # fmt: skip


def test_every_variant_has_a_summary_or_a_reason():
    found = {fn.__name__: fn.spec.no_summary for fn in la.VARIANTS if not fn.spec.composes}
    assert found.keys() == REASONS.keys()
    assert all(REASONS[name] in why for name, why in found.items()), found


@pytest.mark.parametrize("fn", [fn for fn in la.VARIANTS if not fn.spec.composes], ids=lambda fn: fn.__name__)
def test_states_that_do_not_compose_have_no_summary(fn):
    words = f"summary: fn is {fn.__name__}, whose states do not compose ({fn.spec.no_summary})"
    with pytest.raises(TypeError, match=re.escape(words)):
        la.summary(fn, np.zeros((2, 1, 3)), np.zeros((2, 1, 3)), np.zeros((2, 1, 3)))


def test_options_about_states_are_refused():
    case = PLAIN[0]
    arrays, state = drawn(case)
    for name, value in (("state", state), ("reverse", True), ("return_state", True), ("return_states_at", [2])):
        with pytest.raises(ValueError, match=f"summary: {name} is given, expected none"):
            la.summary(case.fn, **arrays, **{name: value})
    la.summary(case.fn, **arrays, state=None, return_state=False)  # their defaults
    with pytest.raises(TypeError, match="summary: fn is 3, expected a variant"):
        la.summary(3)
    with pytest.raises(TypeError, match="compose: a int was given, expected a Summary"):
        la.compose(1, 2)
    with pytest.raises(TypeError, match="entry_states: a NoneType was given, expected a Summary"):
        la.entry_states([])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_states_that_do_not_fit_spans(case):
    """A float32 state loses nothing more beside spans in float64; two spans are of one variant and size."""
    fn = case.fn
    arrays, state = draw(case, T=6)
    spans = [la.summary(fn, **tokens(case, arrays, *at), **case.options) for at in ((0, 2), (2, 6))]
    narrow = parts_like(state, [S.astype(kind_like(S, np.float32)) for S in parts(state)])
    again = parts_like(state, [S.astype(kind_like(S, np.float64)) for S in parts(narrow)])
    for x, y in zip(la.entry_states(spans, narrow), la.entry_states(spans, again), strict=True):
        assert_same(x, y)
    wider = la.summary(fn, **draw(case, T=6, H=3, V=4)[0], **case.options)
    with pytest.raises(ValueError, match=r"^compose: a span has offset .*, expected offset .* as the first one has$"):
        la.compose(spans[0], wider)
    with pytest.raises(ValueError, match=r"^entry_states: .* has shape \(1, .*\), expected \(2, "):
        la.entry_states(spans, parts_like(state, [S[:1] for S in parts(state)]))
    wrong = parts(state)[0] if isinstance(state, tuple) else (state,)
    with pytest.raises(TypeError, match=r"^entry_states: state is a "):
        la.entry_states(spans, wrong)


def test_log_decays_of_minus_infinity_cut_a_span_off():
    case = next(c for c in PLAIN if c.fn is la.gla)
    arrays, state = drawn(case)
    arrays["g"] = arrays["g"].copy()
    arrays["g"][:, 2] = -np.inf
    found, pullback = la.vjp(la.summary, la.gla, **tokens(case, arrays, 0, 5))
    assert np.all(la.entry_states([found], state)[1] == found.offset)
    grads = pullback(*found._replace(transfer=type(found.transfer)(*map(np.ones_like, found.transfer))))
    assert all(np.isfinite(d).all() for d in grads if d is not None)


@pytest.mark.parametrize(
    "fn", [la.kda, la.gla, la.mlstm, la.momentum_delta_rule, la.block_scan], ids=lambda fn: fn.__name__
)
def test_autograd_goes_through_summaries(fn):
    torch = pytest.importorskip("torch")
    case = next(c for c in PLAIN if c.fn is fn)
    arrays, state = drawn(case)
    own = {n: torch.tensor(x, requires_grad=True) for n, x in arrays.items()}
    S = parts_like(state, [torch.tensor(y, requires_grad=True) for y in parts(state)])

    def cut(a, b):
        return {n: x if x is None else own[n].narrow(1, a, b - a) if case.on_tokens(n) else own[n]
                for n, x in tokens(case, arrays, a, b).items()}  # fmt: skip

    found = [la.summary(fn, **cut(a, b)) for a, b in ((0, 4), (4, 11))]
    end = la.entry_states(found, S)[-1]
    sum((y * y).sum() for y in parts(end)).backward()
    (_, whole), pullback = la.vjp(fn, **tokens(case, arrays, 0, 11), state=state, return_state=True)
    grads = pullback(None, parts_like(whole, [2 * y for y in parts(whole)]))
    for name, x in own.items():
        if name != case.spec.change.query:
            assert_same(x.grad.numpy(), getattr(grads, name), 1e-11)
    for a, b in zip(parts(S), parts(grads.state), strict=True):
        assert_same(a.grad.numpy(), b, 1e-11)


@pytest.mark.parametrize(
    "fn", [la.gated_delta_rule, la.simple_gla, la.momentum_delta_rule, la.block_scan], ids=lambda fn: fn.__name__
)
def test_jax_differentiates_summaries_inside_jit(fn):
    jax = pytest.importorskip("jax")
    case = next(c for c in PLAIN if c.fn is fn)
    arrays, state = draw(case, T=11, dtype=np.float32)

    def loss(given, S):
        first, second = ({n: x[:, a:b] if case.on_tokens(n) else x for n, x in given.items()}
                         for a, b in ((0, 4), (4, 11)))  # fmt: skip
        end = la.entry_states([la.summary(fn, **first), la.summary(fn, **second)], S)[-1]
        return sum((y * y).sum() for y in parts(end))

    grads, dstate = jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, state)
    (_, whole), pullback = la.vjp(fn, **tokens(case, arrays, 0, 11), state=state, return_state=True)
    wanted = pullback(None, parts_like(whole, [2 * y for y in parts(whole)]))
    assert_same(dstate, wanted.state, 1e-5)
    for name in (n for n in case.given if n != case.spec.change.query):
        assert_same(grads[name], getattr(wanted, name), 1e-5)


def test_complex_factors_compose():
    """Spans of complex and negative factors, with zeros: states, and gradients that are those of one call."""
    rng = np.random.default_rng(11)
    a, x = rng.standard_normal((2, 2, 9, 3)) + 1j * rng.standard_normal((2, 2, 9, 3))
    a[:, 4, 1] = 0
    h = rng.standard_normal((2, 3)) + 0j
    pairs = [la.vjp(la.summary, la.scan, a[:, s:e], x[:, s:e]) for s, e in itertools.pairwise((0, 3, 4, 9))]
    states, back = la.vjp(la.entry_states, [span for span, _ in pairs], h)
    (_, end), pull = la.vjp(la.scan, a, x, state=h, return_state=True)
    assert np.allclose(states[-1], end, rtol=1e-12)
    one = la.compose(la.compose(pairs[0][0], pairs[1][0]), pairs[2][0])
    assert np.allclose(one.transfer.factors, a.prod(1), rtol=1e-12)
    d = rng.standard_normal((2, 3)) + 1j * rng.standard_normal((2, 3))
    dspans, dh = back((None, None, None, d))
    whole = pull(None, d)
    assert np.allclose(dh, whole.state, rtol=1e-12)
    grads = [p(*dspan) for (_, p), dspan in zip(pairs, dspans, strict=True)]
    for name in ("a", "x"):
        assert np.allclose(np.concatenate([getattr(g, name) for g in grads], 1), getattr(whole, name), rtol=1e-11)
