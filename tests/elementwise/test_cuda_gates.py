"""Recurrences whose factors and inputs kernels make of a variant's arrays, emulated here or on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.elementwise.types import FORMULAS
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.elementwise.test_cuda import scans  # noqa: F401

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = (np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
every_formula = pytest.mark.parametrize("name", FORMULAS)
COMPLEX = {FLOAT64: np.dtype(np.complex128)}


def drawn(name, dtype=FLOAT32, T=70, D=40, B=(2,), sequences=None, seed=0):
    """(arrays by name, state): tokens in `dtype`, parameters in float32 or wider."""
    rng, fn = np.random.default_rng(seed), getattr(la, name)
    arrays, wide = la.testing.sample(fn, rng, B=B, T=T, V=D), FLOAT64 if dtype == FLOAT64 else FLOAT32
    state = rng.standard_normal((*(B if sequences is None else (sequences,)), D))
    if name == "lru":
        state = (state - 2j * state[::-1]).astype(COMPLEX.get(dtype, np.complex64))
    own = {n: x.real.astype(dtype if x.ndim > 1 else wide) for n, x in arrays.items()}
    return own, state if name == "lru" else state.astype(wide)


def called(name, arrays, state, bring=np.asarray, see=np.asarray, rounded=None, without=(), **options):
    """[out, final state, gradients]; rounded: the dtype that the cotangent of out is rounded to."""
    fn = getattr(la, name)
    given = {n: bring(x) for n, x in arrays.items()} | ({} if state is None else {"state": bring(state)})
    (out, end), pull = la.vjp(fn, **given, return_state=True, **options)
    out, end, rng = see(out), see(end), np.random.default_rng(1)
    dout, dend = (rng.standard_normal(y.shape) * (1 - 2j if y.dtype.kind == "c" else 1) for y in (out, end))
    dout = dout.astype(rounded or out.dtype).astype(out.dtype)
    dout, dend = (
        None if "dout" in without else bring(dout),
        None if "dend" in without else bring(dend.astype(end.dtype)),
    )
    return [out, end, *(see(d) for d in pull(dout, dend) if d is not None)]


def compare(device, name, arrays, state, **options):  # noqa: F811
    """Results and gradients against the definition, and the same bits again; one kernel a pass has done it."""
    found, again = (called(name, arrays, state, device.bring, device.see, **options) for _ in range(2))
    wide = {n: x.astype(complex if x.dtype.kind == "c" else float) for n, x in arrays.items()}
    begin = None if state is None else state.astype(np.result_type(state, float))
    exact = called(name, wide, begin, backend="reference",
                   rounded=found[0].dtype, **options)  # fmt: skip
    for y, same, e in zip(found, again, exact, strict=True):
        assert y.tobytes() == same.tobytes()
        eps = float(ml_dtypes.finfo(y.real.dtype).eps)
        few = 0.6 * eps if y.dtype.itemsize == 2 else 512 * eps
        assert np.linalg.norm(y.astype(e.dtype) - e) <= few * np.linalg.norm(e)
    if device.launched is not None:
        files = [(file, entry) for file, entry, *_ in device.launched if entry != "clear" and file != "ops/sums.cu"]
        assert files == [("elementwise/scan.cu", "scan")] * 4
    return found


@every_formula
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32, FLOAT64], ids=str)
def test_it_is_the_definition_in_every_dtype(scans, name, dtype):  # noqa: F811
    """Several tiles, of which the last one is not whole."""
    compare(scans, name, *drawn(name, dtype, 300, 40, (1,)))


@every_formula
@pytest.mark.parametrize(("B", "T", "D"), [((2,), 1, 40), ((1,), 5, 3), ((2, 2), 33, 66), ((), 0, 8)], ids=str)
def test_short_and_odd_ones(scans, name, B, T, D):  # noqa: F811
    arrays, state = drawn(name, FLOAT32, T, D, B)
    if T:
        compare(scans, name, arrays, state)
    else:
        found = called(name, arrays, state, scans.bring, scans.see)
        np.testing.assert_array_equal(found[1], state)


@every_formula
def test_groups_of_tiles_are_linked(scans, name):  # noqa: F811
    compare(scans, name, *drawn(name, BFLOAT16, 1200, 33, (1,)))


@every_formula
@pytest.mark.parametrize("without", ["state", "dout", "dend"])
def test_without(scans, name, without):  # noqa: F811
    arrays, state = drawn(name, FLOAT32, 70)
    compare(scans, name, arrays, None if without == "state" else state, without=(without,), scale=-0.3)


@every_formula
def test_sequences_side_by_side(scans, name):  # noqa: F811
    offsets = [0, 0, 1, 18, 150, 151, 300]
    arrays, state = drawn(name, BFLOAT16, offsets[-1], B=(1,), sequences=len(offsets) - 1)
    found = compare(scans, name, arrays, state, cu_seqlens=offsets)
    part = {n: x[:, 18:150] if x.ndim > 1 else x for n, x in arrays.items()}
    alone = called(name, part, state[3:4], scans.bring, scans.see)
    assert found[0][0, 18:150].tobytes() == alone[0][0].tobytes()
    assert found[1][3].tobytes() == alone[1][0].tobytes()


@every_formula
def test_arrays_of_any_layout_and_dtype(scans, name):  # noqa: F811
    """Channels apart, rows that begin anywhere, other dtypes of gates and parameters."""
    arrays, state = drawn(name, FLOAT32, 130, 40)
    names = [n for n, x in arrays.items() if x.ndim > 1]
    arrays |= {n: arrays[n].astype(BFLOAT16) for n in names[1:2]}
    arrays |= {n: x.astype(FLOAT16) for n, x in arrays.items() if x.ndim == 1}
    whole = np.zeros((2, 130, 43), FLOAT32)
    whole[..., 1:41] = arrays["x"]
    expected = called(name, arrays, state, scans.bring, scans.see)
    given = {n: scans.bring(x) for n, x in arrays.items()}
    apart = scans.xp.moveaxis(scans.bring(np.ascontiguousarray(np.moveaxis(arrays[names[-1]], -1, 0))), 0, -1)
    given |= {names[-1]: apart, "x": scans.bring(whole)[..., 1:41]}
    found = called(name, given, scans.bring(state), lambda x: x if hasattr(x, "data") and type(x) is not np.ndarray else
                   scans.bring(x), scans.see)  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    compare(scans, name, arrays, state) if scans.launched is None else None


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("gamma", [True, False], ids=["gamma", "no gamma"])
def test_complex_inputs(scans, dtype, gamma):  # noqa: F811
    arrays, state = drawn("lru", dtype, 130)
    arrays["x"] = (arrays["x"] + 1j * arrays["x"][:, ::-1]).astype(state.dtype)
    if not gamma:
        del arrays["gamma_log"]
    compare(scans, "lru", arrays, state)


EDGES = (-np.inf, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, np.inf)


@pytest.mark.parametrize("name", ["min_gru", "min_lstm", "rg_lru"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_gates_at_their_ends(scans, name, dtype):  # noqa: F811
    """Every pair of values of two gates: finite where the definition is, and equal."""
    arrays, _ = drawn(name, dtype, 1, 81, (1,))
    gates = [n for n, x in arrays.items() if x.ndim > 1 and n != "x"]
    for n, values in zip(gates, np.meshgrid(EDGES, EDGES), strict=False):
        arrays[n] = values.reshape(1, 1, 81).astype(dtype)
    state = np.ones((1, 81), FLOAT32)
    with np.errstate(all="ignore"):
        found = called(name, arrays, state, scans.bring, scans.see)
        wide = {n: x.astype(float) for n, x in arrays.items()}
        exact = called(name, wide, state.astype(float), backend="reference", rounded=found[0].dtype)
    for y, e in zip(found, exact, strict=True):
        known = np.isfinite(e)
        bound = (2.0**-7 if y.dtype.itemsize == 2 else 1e-5) * abs(e[known]) + 1e-6
        assert (abs(y.astype(float) - e)[known] <= bound).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_a_hard_reset_takes_the_input_in(scans, dtype):  # noqa: F811
    arrays, state = drawn("hgrn", dtype, 100, 40, (1,))
    arrays["g"][:, 60] = -np.inf
    found = called("hgrn", arrays, state, scans.bring, scans.see)
    np.testing.assert_array_equal(found[0][:, 60], arrays["x"][:, 60])
    assert all(np.isfinite(y.astype(float)).all() for y in found)
