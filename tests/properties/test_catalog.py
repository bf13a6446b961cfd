"""One property table over every variant, option set, backend and form: values and gradients."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.binding import inputs_of, prepare
from linattn_np.matrix_state.types import Inputs
from linattn_np.testing import check_vjp, relative_error
from tests.cases import (
    CASES,
    FORMS,
    LENGTHS,
    PLAIN,
    WIDTHS,
    call,
    cotangents,
    covered,
    draw,
    enumerate_parts,
    naive,
    parts,
    parts_like,
    with_gradients,
    worst,
)

pytest.importorskip("numba")  # what has no compiler runs the other backends in tests/matrix_state

REFERENCE, CHUNKS, NUMBA = ({"backend": name} for name in ("reference", "chunks", "numba"))
IN_CHUNKS, COMPILED = CHUNKS | {"chunk_size": 16}, NUMBA | {"chunk_size": 16}
BACKENDS = (
    REFERENCE,
    CHUNKS,
    CHUNKS | {"chunk_size": 1},
    IN_CHUNKS,
    CHUNKS | {"chunk_size": "parallel"},
    NUMBA,
    NUMBA | {"chunk_size": 1},
    COMPILED,
    {},
)  # {}: the default
HEADS = {  # (Hq, Hk, H)
    "one head": (1, 1, 1),
    "three": (3, 3, 3),
    "keys and queries shared": (2, 2, 4),
    "keys shared": (4, 2, 4),
    "queries shared": (2, 4, 4),
    "one key for all": (1, 1, 3),
    "states shared by queries": (4, 2, 2),
    "one state for all queries": (3, 1, 1),
}
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_variant = pytest.mark.parametrize("case", PLAIN, ids=str)


def check_value(case, bound=1e-12, backends=BACKENDS, **sizes):
    """Every backend and form against the loop."""
    arrays, state = draw(case, **sizes)
    expected = dict(enumerate_parts("state", naive(case, arrays, state)[1])) | {"out": naive(case, arrays, state)[0]}
    for how in covered(case, backends):
        out, end = call(case, arrays, state=state, **how)
        error, what = worst(dict(enumerate_parts("state", end)) | {"out": out}, expected)
        assert error <= bound, (how, what, error)


@every_case
def test_forward_is_the_loop(case):
    check_value(case, T=37, B=(2,))


@every_case
def test_no_state_is_a_state_of_zeros(case):
    arrays, state = draw(case, T=7)
    zeros = parts_like(state, [S * 0 for S in parts(state)])
    for a, b in zip(parts(call(case, arrays)), parts(call(case, arrays, state=zeros)), strict=True):
        np.testing.assert_array_equal(a, b)
    check_value(case, backends=(CHUNKS, NUMBA), T=7)


@pytest.mark.parametrize("T", LENGTHS)
@every_variant
def test_lengths(case, T):
    check_value(case, backends=({}, IN_CHUNKS, COMPILED, {"chunk_size": "parallel"}), T=T, B=(1,), K=4, V=3)


@pytest.mark.parametrize("K", WIDTHS)
@every_variant
def test_key_widths(case, K):
    check_value(case, backends=({}, NUMBA | {"chunk_size": 3}, {"chunk_size": 1}), T=5, B=(1,), K=K, V=2, H=1)


@every_variant
def test_wide_values(case):
    check_value(case, backends=({}, CHUNKS, NUMBA | {"chunk_size": 3}), T=5, B=(1,), K=3, V=130, H=1)


@pytest.mark.parametrize("B", [(), (2, 3), (0,), (2, 0)], ids=str)
@every_case
def test_batch_axes(case, B):
    check_value(case, backends=(CHUNKS, NUMBA, COMPILED), T=6, B=B)
    arrays, state = draw(case, T=6, B=B)
    expected = with_gradients(case, arrays, state=state, chunk_size=1)
    for form in covered(case, (COMPILED, {"chunk_size": "parallel"})):
        assert worst(with_gradients(case, arrays, state=state, **form), expected)[0] <= 1e-11


def heads_of(case, heads):
    """The sizes of a head layout, or a skip where the variant is defined without more queries than states."""
    Hq, Hk, H = HEADS[heads]
    if not case.spec.shares_states and Hq > H:
        pytest.skip("x, D and z have one head per state")
    return {"Hq": Hq, "Hk": Hk, "H": H}


@pytest.mark.parametrize("heads", HEADS)
@every_variant
def test_heads(case, heads):
    check_value(case, backends=(REFERENCE, IN_CHUNKS, NUMBA, COMPILED), T=9, B=(2,), **heads_of(case, heads))


@pytest.mark.parametrize("case", [c for c in CASES if not c.causal], ids=str)
@pytest.mark.parametrize("Tq", [1, 5, 40])
def test_queries_of_their_own_length(case, Tq):
    check_value(case, T=9, Tq=Tq)
    arrays, state = draw(case, T=9, Tq=Tq)
    check_vjp(case.fn, **arrays, **case.options, state=state)


@every_case
def test_forms_agree_with_gradients(case):
    arrays, state = draw(case, T=70, K=7, V=4)
    expected = with_gradients(case, arrays, state=state, chunk_size=1)
    for form in covered(case, (*FORMS[1:], IN_CHUNKS, {"chunk_size": 70})):
        error, what = worst(with_gradients(case, arrays, state=state, **form), expected)
        assert error <= 1e-11, (form, what, error)


@pytest.mark.parametrize("T", [0, 1, 16, 17, 65])
@every_variant
def test_forms_agree_at_awkward_lengths(case, T):
    arrays, state = draw(case, T=T, K=3, V=2, B=(1,))
    expected = with_gradients(case, arrays, state=state, chunk_size=1)
    for form in covered(case, (*FORMS[1:], IN_CHUNKS)):
        error, what = worst(with_gradients(case, arrays, state=state, **form), expected)
        assert error <= 1e-11, (form, what, error)


@pytest.mark.parametrize(
    "form",
    [
        REFERENCE,
        CHUNKS | {"chunk_size": 5},
        {"chunk_size": "parallel"},
        NUMBA | {"chunk_size": 1},
        NUMBA | {"chunk_size": 5},
        {},
    ],
    ids=str,
)
@every_case
def test_pullback_by_central_differences(case, form):
    arrays, state = draw(case, T=13, K=5, V=3)
    errors = check_vjp(case.fn, **arrays, **case.options, **form, state=state)
    assert set(errors) == {*case.given, "state"}


@pytest.mark.parametrize("heads", HEADS)
@every_variant
def test_pullback_of_grouped_heads(case, heads):
    arrays, state = draw(case, T=6, **heads_of(case, heads))
    for backend in covered(case, (CHUNKS, NUMBA)):
        check_vjp(case.fn, **arrays, **case.options, **backend, chunk_size=4, state=state)


@every_variant
def test_pullback_across_tiles(case, monkeypatch):
    """Tiles of 4 tokens, so that the parallel form has tiles between a reader and a writer."""
    from linattn_np.matrix_state import policy

    monkeypatch.setattr(policy, "ARRAY_CHUNK", 4)
    arrays, state = draw(case, T=15, K=3, V=2, B=(1,))
    check_vjp(case.fn, **arrays, **case.options, chunk_size="parallel", state=state)


@pytest.mark.parametrize("case", [case for case in CASES if case.is_linear], ids=str)
def test_adjoint_dot_product(case):
    """<J x, w> = <x, J^T w>: exact in v and in the state, where the call is linear."""
    arrays, state = draw(case, T=40, K=6, V=4)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, chunk_size=16)
    dout, dstate = cotangents(result)
    grads = pullback(dout, dstate)
    value = case.spec.change.value

    def pairing(x, w):
        return sum(float((a * b.conj()).sum().real) for a, b in zip(parts(x), parts(w), strict=True))

    if case.normalised:  # linear in v alone: of the rest of the state, only S = 0 and a last v = 0 are written to
        linear = [n for n in ("S", "v") if n in state._fields]
        zero = state._replace(**{n: 0 * getattr(state, n) for n in linear})
        out, end = call(case, arrays, state=zero, chunk_size=16)
        left = pairing((out, *(getattr(end, n) for n in linear)), (dout, *(getattr(dstate, n) for n in linear)))
        right = pairing(arrays[value], getattr(grads, value))
    else:
        out, end = result
        left = pairing((out, end), (dout, dstate))
        right = pairing((arrays[value], state), (getattr(grads, value), grads.state))
    assert abs(left - right) <= 1e-12 * max(1.0, abs(left), np.sqrt(out.size) * np.abs(out).max())


@every_variant
def test_pullback_of_out_alone_and_of_the_state_alone(case):
    """The pullback is linear: its two halves add up to the whole."""
    arrays, state = draw(case, T=9)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    dout, dstate = cotangents(result)
    for a, b, c in zip(*(parts(pullback(*d)) for d in ((dout, dstate), (dout, None), (None, dstate))), strict=True):
        assert relative_error(b + c, a) <= 1e-13


@every_variant
def test_the_pullback_may_be_called_twice(case):
    arrays, state = draw(case, T=9)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    for a, b in zip(parts(pullback(*cotangents(result))), parts(pullback(*cotangents(result))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", [case for case in CASES if case.erases], ids=str)
def test_one_sum_where_a_key_also_erases(case):
    """A backend may return the gradients of key and erase vector as one sum."""
    arrays, state = draw(case)
    prepared = prepare(case.fn.spec, (), {**arrays, **case.options, "state": state})
    x = inputs_of(prepared)
    if not isinstance(x, Inputs) or not prepared.plan.erases_key:
        pytest.skip("nothing erases, or a vector of its own does")
    rng = np.random.default_rng(0)
    d = Inputs(*(None if y is None else rng.standard_normal(y.shape) for y in x))
    apart = case.fn.spec.change.to_core_vjp(prepared, d)
    summed = case.fn.spec.change.to_core_vjp(prepared, d._replace(k=d.k + d.r, r=None))
    for name, y in apart.items():
        assert relative_error(summed[name], y) < 1e-14, name
