"""Every array library: NumPy's numbers, and library, dtype and device follow the input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.cases import (
    CASES,
    PLAIN,
    Case,
    cotangents,
    draw,
    in_dtype,
    kind_like,
    one_per,
    parts,
    parts_like,
    with_arrays,
)

SIZES = {"T": 11, "B": (2,), "H": 2, "K": 4, "V": 3}
NORMALISED = Case(la.linear_attention, {"feature_map": "elu+1", "normalize": True}, PLAIN[0].given, {})
RAW = one_per(lambda spec: (spec.micro_steps, spec.change.erase_key), [c for c in CASES if c.options.get("qk_l2norm")])
KINDS = [*PLAIN, NORMALISED, *RAW]
pytestmark = pytest.mark.filterwarnings("ignore:Increasing number of chunks")  # dask, of its own products


def brought(library, x):
    """Arrays of a call, a state or cotangents in the library."""
    if isinstance(x, dict):
        return {n: library.bring(y) for n, y in x.items()}
    return parts_like(x, [library.bring(S) for S in parts(x)])


def both(library, case, dtype, T=SIZES["T"], **options):
    """[(in the library, in NumPy in float64 with the same numbers)] of outputs and gradients."""
    arrays, state = draw(case, **(SIZES | {"T": T}), dtype=np.dtype(dtype))
    result, pullback = la.vjp(
        case.fn, **{n: wide(y) for n, y in arrays.items()}, **case.options, state=each_wide(state), return_state=True,
        **options,
    )  # fmt: skip
    dout, dstate = cotangents(result)
    dout = None if dout is None else in_dtype(dout, dtype)
    dstate = parts_like(dstate, [in_dtype(d, dtype) for d in parts(dstate)])
    expected = parts(result) + parts(tuple(pullback(wide(dout), each_wide(dstate))))
    mine, pull = la.vjp(
        case.fn, **brought(library, arrays), **case.options, state=brought(library, state), return_state=True, **options
    )
    found = parts(mine) + parts(tuple(pull(library.bring(dout), brought(library, dstate))))
    return list(zip(found, expected, strict=True))


def wide(x):
    return None if x is None else in_dtype(x, np.float64)


def each_wide(state):
    return parts_like(state, [wide(S) for S in parts(state)])


def check_both(library, case, dtype, **sizes):
    where = library.device(library.bring(np.zeros(1, dtype)))
    for x, y in both(library, case, dtype, **sizes):
        assert isinstance(x, library.kind)
        assert str(x.dtype).rsplit(".", 1)[-1] == str(kind_like(y, dtype)) or y.dtype.kind == "i"  # a number of tokens
        assert library.device(x) == where
        assert relative_error(library.see(x), y) <= 50 * np.finfo(dtype).eps


FEW = (with_arrays("q k v g"), with_arrays("q k v g beta"))  # in chunks, where every new shape is compiled or planned


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_numbers_kind_dtype_and_device(library, case):
    """In chunks, or, where that takes long, one token by itself."""
    T = SIZES["T"] if library.quick else 5 if case.fn in FEW else 1
    check_both(library, case, library.dtypes[-1], T=T)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_results_go_backwards_nowhere(case):
    """Strides of array calls' results are not negative: PyTorch and JAX take no such memory."""
    arrays, state = draw(case, **SIZES)
    backend = "chunks" if "chunks" in la.explain(case.fn, **arrays, **case.options).others else None
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True, backend=backend)
    for x in parts(result) + parts(tuple(pullback(*cotangents(result)))):
        assert min(x.strides, default=0) >= 0


@pytest.mark.parametrize("case", RAW, ids=str)
def test_raw_projections_in_float32(library, case):
    check_both(library, case, "float32", T=2 if library.quick else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_other_dtypes_in_chunks(library, case):
    """The test above takes the last one of a library."""
    for dtype in library.dtypes[:-1]:
        check_both(library, case, dtype, T=SIZES["T"])


@pytest.mark.parametrize("form", [{"chunk_size": 1}, {"chunk_size": 4}, {"chunk_size": "parallel"}], ids=str)
@pytest.mark.parametrize("case", one_per(lambda spec: (spec.decay.name, spec.erase.name), PLAIN), ids=str)
def test_forms(library, case, form):
    if not library.quick:
        pytest.skip("thousands of small operations: minutes in this library")
    for dtype in library.dtypes:
        for x, y in both(library, case, dtype, **form):
            assert relative_error(library.see(x), y) <= 50 * np.finfo(dtype).eps


def test_read_and_influence(library):
    rng = np.random.default_rng(0)
    dtype = library.dtypes[-1]
    q, k, v = rng.standard_normal((3, 2, 5, 2, 4)).astype(dtype)
    S, z = rng.standard_normal((2, 2, 4, 3)).astype(dtype), 1 + rng.random((2, 2, 4)).astype(dtype)
    for state in (S, la.NormalisedState(S, z)):
        out, pullback = la.vjp(la.read, abs(q), state)
        mine, pull = la.vjp(la.read, library.bring(abs(q)), brought(library, state))
        grads, expected = pull(mine), pullback(out)
        for x, y in zip([mine, *parts(tuple(grads))], [out, *parts(tuple(expected))], strict=True):
            assert isinstance(x, library.kind)
            assert relative_error(library.see(x), y) <= 200 * np.finfo(dtype).eps
    A = la.influence_matrix(la.linear_attention, *(library.bring(x) for x in (q, k, v)))
    assert isinstance(A, library.kind)
    error = relative_error(library.see(A), la.influence_matrix(la.linear_attention, q, k, v))
    assert error <= 50 * np.finfo(dtype).eps


def test_packed_sequences_and_heads_first(library):
    case = next(c for c in PLAIN if c.fn is la.simple_gla)
    arrays, _ = draw(case, T=9, B=(1,), K=4, V=3, dtype=np.dtype(library.dtypes[0]))
    options = {"cu_seqlens": [0, 3, 3, 9], "return_state": True}
    mine = la.simple_gla(**brought(library, arrays), **options)
    expected = la.simple_gla(**arrays, **options)
    for x, y in zip(mine, expected, strict=True):
        assert relative_error(library.see(x), y) <= 50 * 2.0**-23
    turned = {n: np.ascontiguousarray(np.moveaxis(x, 1, 2)) for n, x in arrays.items()}
    options["layout"] = "heads_first"
    mine = la.simple_gla(**brought(library, turned), **options)
    expected = la.simple_gla(**turned, **options)
    for x, y in zip(mine, expected, strict=True):
        assert relative_error(library.see(x), y) <= 50 * 2.0**-23


def test_overwritten_state_where_the_library_allows_it(library):
    case = next(c for c in PLAIN if c.fn is la.simple_gla)
    arrays, state = draw(case, **SIZES, dtype=np.dtype(library.dtypes[0]))
    expected = la.simple_gla(**arrays, state=state, return_state=True)[1]
    mine = library.bring(state.copy())
    call = {**brought(library, arrays), "state": mine, "overwrite_state": True, "return_state": True}
    if library.name == "numpy, read-only":
        with pytest.raises(ValueError, match="simple_gla: state is read-only, expected a writeable array"):
            la.simple_gla(**call)
        return
    end = la.simple_gla(**call)[1]
    assert relative_error(library.see(end), expected) <= 50 * 2.0**-23
    if library.name in ("numpy", "torch", "array-api-strict"):
        assert end is mine


def test_torch_bfloat16():
    torch = pytest.importorskip("torch")
    case = next(c for c in PLAIN if c.fn is la.kda)
    arrays, state = draw(case, **SIZES, dtype=ml_dtypes.bfloat16)
    state = state.astype(np.float32)
    expected = la.kda(**arrays, state=state)
    mine = {n: torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16) for n, x in arrays.items()}
    result, pullback = la.vjp(la.kda, **mine, state=torch.from_numpy(state), return_state=True)
    assert result.out.dtype is torch.bfloat16
    assert result.state.dtype is torch.float32
    grads = pullback(result.out, result.state)
    assert {getattr(grads, n).dtype for n in arrays} == {torch.bfloat16}
    assert grads.state.dtype is torch.float32
    la.testing.assert_close(result.out, expected.astype(np.float32), eps=1)


def test_torch_tensors_that_require_gradients():
    """They come in; what goes out is a plain result (the bridge of torch's autograd is another matter)."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 5, 2, 3, requires_grad=True)
    out = la.linear_attention(q, q, q)
    la.testing.assert_close(out, la.linear_attention(*(q.detach().numpy(),) * 3))


class Foreign:
    """An array of a library that nobody has heard of: it has __dlpack__ and its module has from_dlpack."""

    def __init__(self, x):
        self.x = np.ascontiguousarray(x)

    def __dlpack__(self, **keywords):
        return self.x.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def from_dlpack(x):
    return Foreign(np.from_dlpack(x))


@pytest.mark.parametrize("case", [*PLAIN, NORMALISED], ids=str)
def test_any_array_with_dlpack_comes_in_and_the_same_kind_goes_out(case):
    arrays, state = draw(case, **SIZES)
    result, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    dout, dstate = cotangents(result)
    theirs = {n: Foreign(x) for n, x in arrays.items()}
    mine, pull = la.vjp(
        case.fn,
        **theirs,
        **case.options,
        return_state=True,
        state=parts_like(state, [Foreign(S) for S in parts(state)]),
    )
    grads = pull(Foreign(dout), parts_like(dstate, [Foreign(S) for S in parts(dstate)]))
    expected = parts(result) + parts(tuple(pullback(dout, dstate)))
    for x, y in zip(parts(mine) + parts(tuple(grads)), expected, strict=True):
        assert type(x) is Foreign
        np.testing.assert_array_equal(x.x, y)


def test_dlpack_in_is_no_copy_and_overwrites_in_place():
    state = Foreign(np.zeros((1, 2, 3, 3)))
    q = Foreign(np.ones((1, 4, 2, 3)))
    _, end = la.linear_attention(q, q, q, state=state, overwrite_state=True, return_state=True)
    np.testing.assert_array_equal(state.x, np.full((1, 2, 3, 3), 4.0))
    np.testing.assert_array_equal(end.x, state.x)


# mixtures that are refused


def test_two_libraries():
    strict = pytest.importorskip("array_api_strict")
    q, s = np.ones((1, 4, 2, 3)), strict.ones((1, 4, 2, 3))
    with pytest.raises(TypeError, match="linear_attention: k is an array of array_api_strict and q of numpy, expected"):
        la.linear_attention(q, s, q)
    with pytest.raises(TypeError, match="linear_attention: state is an array of array_api_strict and q of numpy"):
        la.linear_attention(q, q, q, state=strict.zeros((1, 2, 3, 3)))
    with pytest.raises(TypeError, match="read: state is an array of array_api_strict and q of numpy"):
        la.read(q, strict.zeros((1, 2, 3, 3)))
    with pytest.raises(TypeError, match=r"linear_attention: k is an array of tests and q of numpy, expected"):
        la.linear_attention(q, Foreign(q), q)


def test_cotangents_of_another_library():
    strict = pytest.importorskip("array_api_strict")
    q, S = np.ones((1, 4, 2, 3)), np.ones((1, 2, 3, 3))
    _, pullback = la.vjp(la.linear_attention, q, q, q, state=S, return_state=True)
    with pytest.raises(TypeError, match="linear_attention: dout is an array of array_api_strict and q of numpy"):
        pullback(strict.ones((1, 4, 2, 3)))
    with pytest.raises(TypeError, match="linear_attention: dstate is an array of array_api_strict and q of numpy"):
        pullback(None, strict.ones((1, 2, 3, 3)))
    _, pullback = la.vjp(la.read, q, S)
    with pytest.raises(TypeError, match="read: dout is an array of array_api_strict and q of numpy"):
        pullback(strict.ones((1, 4, 2, 3)))


def test_two_devices():
    strict = pytest.importorskip("array_api_strict")
    here = strict.ones((1, 4, 2, 3))
    there = strict.ones((1, 4, 2, 3), device=strict.Device("device1"))
    with pytest.raises(TypeError, match=r"linear_attention: v is on device .*device1.* and q on .*CPU.*, expected all"):
        la.linear_attention(here, here, there)
    _, pullback = la.vjp(la.linear_attention, here, here, here)
    with pytest.raises(TypeError, match=r"linear_attention: dout is on device .*device1.* and q on .*CPU"):
        pullback(there)
    out = la.linear_attention(there, there, there)
    assert out.device == strict.Device("device1")


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (np.ma.array(np.ones((1, 4, 2, 3))), "numpy.ma.*MaskedArray"),
        (np.ones((4, 3)).view(np.matrix), "numpy.*matrix"),
        ([[1.0]], "list"),
        (1.0, "float"),
        ("elu", "str"),
        (object(), "object"),
    ],
    ids=lambda x: "" if not isinstance(x, str) else x,
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_what_is_not_a_plain_array(wrong, kind):
    q = np.ones((1, 4, 2, 3))
    with pytest.raises(TypeError, match=f"linear_attention: k is a {kind}, expected a"):
        la.linear_attention(q, wrong, q)
