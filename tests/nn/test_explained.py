"""Every piece in la.explain, la.check, `linattn doctor` and warmup, and with out=."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np import doctor
from linattn_np.matrix_state.cpu import kernels as of_matrix_states
from linattn_np.nn.declaration import PIECES
from linattn_np.nn.samples import options_of, sample
from linattn_np.ops.cpu import kernels
from linattn_np.runtime.pieces.piece import JIT
from tests.nn.table import CASES, SMALL, normal

cases = lambda every: pytest.mark.parametrize("case", every, ids=lambda c: f"{c.name} {c.label}".strip())  # noqa: E731
ARRAY_CALLS = {"dropout"}


def given(case, **changed):
    return {**case.arrays, **case.whole, **case.options, **changed}


# la.explain


@cases(CASES)
def test_explain_names_the_backend_and_counts_bytes(case):
    found = la.explain(case.fn, **given(case))
    compiled = case.name not in ARRAY_CALLS and (case.name != "token_shift" or "mix" in case.arrays)
    assert found.backend == ("numba" if compiled else "reference")
    assert not found.slow
    result = case()
    every = [*case.arrays.values(), *case.whole.values(), *(result if isinstance(result, tuple) else (result,))]
    assert found.bytes == sum(x.nbytes for x in every)
    assert found.compute_dtype == "float64"
    assert case.name in str(found)
    asked = la.explain(case.fn, **given(case, backend="reference"))
    assert (asked.backend, asked.reason) == ("reference", "as requested")
    assert asked.slow


def test_explain_counts_the_operations_of_products():
    x, weight = normal(2, 7, 5), normal(5, 3)
    assert la.explain(la.nn.linear, x, weight).operations == 2 * 14 * 5 * 3
    assert la.explain(la.nn.short_conv, x, normal(5, 4)).operations == 2 * 14 * 5 * 4
    assert la.explain(la.nn.cross_entropy, x, np.zeros((2, 7), int), weight).operations == 2 * 14 * 5 * 3
    assert la.explain(la.nn.silu, x).operations == 0


def test_explain_of_other_libraries(library):
    x = library.bring(normal(2, 7, 5).astype(np.float32))
    found = la.explain(la.nn.rms_norm, x)
    assert found.compute_dtype == "float32"
    assert (found.backend == "numba") == (not found.slow)
    odd = la.explain(la.nn.rms_norm, normal(3, 4), normal(4), normal(3, 4))
    assert odd.reason == "weight and bias have two shapes"


# la.check


@cases(CASES)
def test_check_finds_no_fault_in_the_samples_and_numbers_that_are_none(case):
    assert [f for f in la.check(case.fn, **given(case)) if f.is_error] == []
    for name, x in case.arrays.items():
        for wrong, word in ((np.nan, "NaN"), (np.inf, "inf")):
            changed = x.copy()
            changed[(-1,) * x.ndim] = wrong
            (found,) = la.check(case.fn, **given(case, **{name: changed}))
            assert (found.array, found.is_error) == (name, True)
            assert f"is {word} at 1 of {x.size} places" in found.message


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: la.check(la.nn.silu, np.where(x == x[0, 1, 2], np.nan, x)), "first at (0, 1, 2)"),
        (
            lambda x: la.check(la.nn.short_conv, np.where(x == x[1, 3, 0], np.nan, x), normal(6, 4)),
            "first at batch 1, token 3, channel 0",
        ),
        (lambda x: la.check(la.nn.l2_norm, 0 * x, eps=0), "rows of zeros and eps is 0"),
        (lambda x: la.check(la.nn.rotary, np.swapaxes(x[:, :, None], 1, 2).repeat(2, 1)), "2 tokens of 11 heads"),
        (lambda x: la.check(la.nn.xpos, x[:, :, None].astype("float32"), scale_base=2.0, offset=190),
         "puts a token at 200"),
        (lambda x: la.check(la.nn.log_decay, x, np.full(6, 30.0)), "A_log is 30"),
        (lambda x: la.check(la.nn.cross_entropy, x, np.full((2, 11), -100)), "is ignore_index=-100 everywhere"),
        (lambda x: la.check(la.merge, x, x[..., 0] - np.inf, x, x[..., 0] - np.inf), "-inf at 22 places"),
    ],
)  # fmt: skip
def test_check_says(call, text):
    (found,) = call(normal(2, 11, 6))
    assert text in str(found)


def test_minus_infinity_is_a_number_where_it_means_none():
    x = normal(2, 11, 6)
    x[0, 1, 2] = -np.inf
    assert la.check(la.nn.softmax, x) == []
    assert la.check(la.nn.cross_entropy, x, np.zeros((2, 11), int)) == []
    assert len(la.check(la.nn.silu, x)) == 1


# out=


@cases(CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_result_is_written_to_out(case, dtype, apart):
    arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
    whole = case(arrays)
    wanted, *ends = whole if isinstance(whole, tuple) else (whole,)
    out = np.full((*wanted.shape, 2) if apart else wanted.shape, np.nan, wanted.dtype)
    out = out[..., 0] if apart else out
    found = case(arrays, out=out)
    own, *states = found if isinstance(found, tuple) else (found,)
    assert own is out
    for a, b in zip((out, *states), (wanted, *ends), strict=True):
        np.testing.assert_array_equal(a, b)


@cases(SMALL)
def test_out_may_be_an_input_or_overlap_one(case):
    first = next(iter(case.arrays))
    wanted = case()
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    if wanted.shape != case.arrays[first].shape or case.name in ("embedding", "cross_entropy"):
        pytest.skip("the result has another shape")
    x = case.arrays[first].copy()
    case({first: x}, out=x)
    np.testing.assert_array_equal(x, wanted)
    memory = np.zeros(x.size + 3)
    a, b = memory[3:].reshape(x.shape), memory[:-3].reshape(x.shape)
    a[...] = case.arrays[first]
    case({first: a}, out=b)
    np.testing.assert_array_equal(b, wanted)


def test_out_of_a_step_and_of_other_libraries(library):
    x, taps = (library.bring(y.astype(np.float32)) for y in (normal(2, 5), normal(5, 4)))
    state = library.bring(normal(2, 3, 5).astype(np.float32))
    wanted = la.step(la.nn.short_conv, x, taps, state=state)
    out = library.bring(np.zeros((2, 5), np.float32))
    if any(word in library.name for word in ("read-only", "jax", "dask")):
        with pytest.raises((TypeError, ValueError), match="short_conv: out is "):
            la.step(la.nn.short_conv, x, taps, state=state, out=out)
        return
    assert la.step(la.nn.short_conv, x, taps, state=state, out=out) is out
    np.testing.assert_array_equal(library.see(out), library.see(wanted))


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        ([1.0], TypeError, "silu: out is a list, expected an array"),
        (np.float64(1), TypeError, "silu: out is a float64, expected an array"),
        (np.zeros((2, 5), np.float32), TypeError, "silu: out has dtype float32, expected float64"),
        (np.zeros((2, 4)), ValueError, r"silu: out has shape \(2, 4\), expected \(2, 5\)"),
        (np.zeros((2, 5), ">f8"), TypeError, "silu: out is byte-swapped"),
        (np.broadcast_to(np.zeros(5), (2, 5)), ValueError, "silu: out is read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(5), (2, 5), (0, 8)), ValueError, "silu: out has elements that share"),
    ],
)
def test_errors_of_out(out, kind, text):
    with pytest.raises(kind, match=text):
        la.nn.silu(normal(2, 5), out=out)
    with pytest.raises(ValueError, match="silu: out was given to a call that is differentiated"):
        la.vjp(la.nn.silu, normal(2, 5), out=np.zeros((2, 5)))


def test_merge_has_no_out():
    x = normal(2, 5)
    with pytest.raises(TypeError, match="merge: unknown option 'out'"):
        la.merge(x, x[..., 0], x, x[..., 0], out=x)


# doctor and warmup


def test_every_piece_is_checked_by_doctor(monkeypatch):
    monkeypatch.setattr(doctor, "VARIANTS", ())
    found = list(doctor.checks())
    assert {check.variant for check in found} == {f"nn.{name}" for name in PIECES}
    assert [check for check in found if not check.right] == []
    for name in PIECES:
        backends = {check.backend for check in found if check.variant == f"nn.{name}"}
        assert backends == ({"reference"} if name in {*ARRAY_CALLS, "merge"} else {"reference", "numba"})


@pytest.mark.skipif(not JIT, reason="a test of the loops")
def test_every_loop_of_a_piece_is_among_those_of_warmup(monkeypatch):
    """Kernels of widths that a first call compiles aside."""
    from linattn_np.runtime.pieces import run

    ran, plain = set(), run.function_of
    monkeypatch.setattr(run, "function_of", lambda body, *rest: ran.add(body.__name__) or plain(body, *rest))
    for name, piece in PIECES.items():
        for options in options_of(name):
            result, pullback = la.vjp(piece.function, **sample(name, np.random.default_rng(0), options), **options)
            pullback(np.ones_like(result[0] if isinstance(result, tuple) else result))
    groups = kernels.groups() | of_matrix_states.groups()  # which have formulas of arrays
    known = {kernel.__name__ for group, _ in groups.values() for kernel in group}
    assert ran
    assert ran <= known
