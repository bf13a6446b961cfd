"""The recurrence as CUDA kernels, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.elementwise.test_core import FUNCTIONS

DTYPES = [np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.complex64, np.complex128)]
# By the bytes of a real number, of the norm. A constant factor e^g is rounded once, always alike, and a product of n of
# them has n times its rounding: as many as a sequence has tokens, about 300 here.
ROUNDINGS = {2: 2.0**-7, 4: 300 * 2.0**-23, 8: 300 * 2.0**-52}
BOUND = {str(x): 2.0**-10 if x == np.float16 else ROUNDINGS[x.itemsize // (2 if x.kind == "c" else 1)] for x in DTYPES}
BFLOAT16, FLOAT32 = DTYPES[0], DTYPES[2]
few_dtypes = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
gates = pytest.mark.parametrize("gate", ["a", "g"])


@pytest.fixture
def scans(request, device, monkeypatch):  # noqa: F811
    """The device, whose arrays the public functions take."""
    if device.launched is not None:
        from linattn_np.call import binding, pieces_vjp, positions, results, reverse
        from linattn_np.runtime.arrays import Library, enter
        from tests.matrix_state.cuda.step_twin import CUPY, Stub

        def entering(fn, arrays, beside=None):
            if getattr(beside, "name", "") == "cupy" or any(isinstance(x, Stub) for x in arrays.values()):
                found = {n: x.view(Stub) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
                return Library(CUPY, 0, lambda x: x, "cupy", "x"), found
            return enter(fn, arrays, beside)

        for module in (binding, pieces_vjp, positions, results, reverse):
            monkeypatch.setattr(module, "enter", entering)
    return device


def drawn(gate, dtype, shape=(2, 70, 40), constant=False, N=None, seed=0):
    """(inputs, gate, state, cotangents of out and of the state)"""
    rng = np.random.default_rng(seed)
    *lead, _, D = shape
    states = (*(lead if N is None else (N,)), D)

    def normal(*of):
        x = rng.standard_normal(of)
        return x + 1j * rng.standard_normal(of) if dtype.kind == "c" else x

    own = (D,) if constant else shape
    y = (
        -rng.exponential(0.2, own)
        if gate == "g"
        else rng.uniform(0.9, 1, own) * rng.choice([-1, 0, 1], own, p=(0.3, 0.002, 0.698))
    )
    if dtype.kind == "c":
        y = y + 1j * rng.uniform(-3, 3, own) if gate == "g" else y * np.exp(1j * rng.uniform(-3, 3, own))
    arrays = normal(*shape), y, normal(*states), normal(*shape), normal(*states)
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    return [x.astype(wide if n in (2, 4) else dtype) for n, x in enumerate(arrays)]


def computed(scans, fn, arrays, backend, **options):
    """(out, the final state, gradients of the inputs, the gate, the state), as NumPy arrays."""
    bring, see = (scans.bring, scans.see) if backend == "cuda" else (np.asarray, np.asarray)
    x, y, h, dout, dend = (None if z is None else bring(z) for z in arrays)
    found, pull = la.vjp(fn, x, y, state=h, return_state=True, backend=backend, **options)
    return [see(z) for z in (*found, *pull(dout, dend)) if z is not None]


def widened(arrays):
    return [None if x is None else x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in arrays]


def compare(scans, fn, arrays, bound, **options):
    """Against the definition in float64, and the same bits again."""
    found, again = (computed(scans, fn, arrays, "cuda", **options) for _ in range(2))
    expected = computed(scans, fn, widened(arrays), "reference", **options)
    for one, two, exact in zip(found, again, expected, strict=True):
        assert one.tobytes() == two.tobytes()
        wide = one.astype(exact.dtype)
        assert wide.shape == exact.shape
        assert np.isfinite(wide).all()
        few = bound * (8 if exact.ndim == 1 else 1)  # a sum over all tokens
        assert not exact.size or relative_error(wide, exact) <= few
    if scans.launched is not None:
        assert {file for file, *_ in scans.launched} <= {"elementwise/scan.cu", "ops/sums.cu", "ops/formula.cu"}
        assert "elementwise/scan.cu" in {file for file, *_ in scans.launched} or not arrays[0].size
    return found


EACH = [(x, gate, constant) for x in (BFLOAT16, FLOAT32) for gate in "ag" for constant in (False, True)]
EACH += [(np.dtype(x), "a", False) for x in (np.float16, np.float64, np.complex64)]
EACH += [(np.dtype(x), "g", True) for x in (np.float16, np.float64, np.complex128)]


@pytest.mark.parametrize(("dtype", "gate", "constant"), EACH, ids=str)
def test_it_is_the_definition(scans, dtype, gate, constant):
    """Two and more tiles, of which the last ones are not whole."""
    compare(scans, FUNCTIONS[gate], drawn(gate, dtype, (2, 307, 70), constant), BOUND[str(dtype)])


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 64), (2, 0, 7), (2, 20, 40), (2, 2, 100, 33)], ids=str)
@few_dtypes
def test_one_tile_as_short_as_it_may_be(scans, dtype, shape):
    compare(scans, FUNCTIONS["a"], drawn("a", dtype, shape), BOUND[str(dtype)])


@few_dtypes
def test_groups_of_tiles_are_linked(scans, dtype):
    """More than two groups, and a last one that is not whole."""
    T = 4200 if dtype.itemsize == 2 else 2203
    compare(scans, FUNCTIONS["a"], drawn("a", dtype, (2, T, 33)), BOUND[str(dtype)])


@pytest.mark.parametrize("without", ["state", "dout", "dstate"])
@few_dtypes
def test_without(scans, dtype, without):
    arrays = drawn("a", dtype, (2, 307, 70))
    arrays[{"state": 2, "dout": 3, "dstate": 4}[without]] = None
    compare(scans, FUNCTIONS["a"], arrays, BOUND[str(dtype)])


@pytest.mark.parametrize("options", [{"reverse": True}, {"scale": -0.3}], ids=str)
@gates
@few_dtypes
def test_options(scans, dtype, gate, options):
    compare(scans, FUNCTIONS[gate], drawn(gate, dtype, (2, 307, 70)), BOUND[str(dtype)], **options)


@pytest.mark.parametrize("constant", [False, True], ids=["tokens", "constant"])
@pytest.mark.parametrize("offsets", [[0, 0, 1, 18, 307, 311, 311, 700], [0, 1400, 1401, 1600]], ids=len)
@pytest.mark.parametrize("dtype", [BFLOAT16, DTYPES[5]], ids=str)
def test_sequences_side_by_side(scans, dtype, offsets, constant):
    """The definition; each sequence has the bits that it has alone, and in a batch."""
    fn, N = FUNCTIONS["a"], len(offsets) - 1
    arrays = drawn("a", dtype, (1, offsets[-1], 40), constant, N)
    found = compare(scans, fn, arrays, BOUND[str(dtype)], cu_seqlens=offsets)
    x, y, h, dout, dend = arrays
    for n, (start, stop) in enumerate(pairwise(offsets)):
        part = slice(start, stop)
        own = [x[:, part], y if constant else y[:, part], h[n : n + 1], dout[:, part], dend[n : n + 1]]
        batch = [z if constant and k == 1 else np.concatenate([z, z[::-1] / 2, z]) for k, z in enumerate(own)]
        alone, beside = (computed(scans, fn, z, "cuda") for z in (own, batch))
        for k, (a, b) in enumerate(zip(alone, beside, strict=True)):
            if not (constant and k == 3):  # a sum over all
                assert a[0].tobytes() == b[0].tobytes() == b[2].tobytes()
        for k in (0, 2, *(() if constant else (3,))):
            assert found[k][0, part].tobytes() == alone[k][0].tobytes()
        for k in (1, 4):
            assert found[k][n].tobytes() == alone[k][0].tobytes()


@few_dtypes
def test_arrays_of_any_layout(scans, dtype):
    """Channels apart, rows that begin anywhere, one gate for the whole batch: the same bits."""
    x, y, h, dout, dend = drawn("a", dtype, (3, 307, 40))
    y[...] = y[:1]
    expected = computed(scans, FUNCTIONS["a"], (x, y, h, dout, dend), "cuda")
    whole = np.zeros((3, 307, 43), dtype)
    whole[..., 1:41] = x
    here = scans.bring(whole)[..., 1:41]
    apart = scans.bring(np.ascontiguousarray(np.moveaxis(dout, -1, 0)))
    shared = scans.xp.broadcast_to(scans.bring(y[:1].copy()), y.shape)
    found, pull = la.vjp(FUNCTIONS["a"], here, shared, state=scans.bring(h), return_state=True, backend="cuda")
    grads = pull(scans.xp.moveaxis(apart, 0, -1), scans.bring(dend))
    for one, other in zip((*found, *grads), expected, strict=True):
        assert scans.see(one).tobytes() == other.tobytes()


@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float64"),
                                   ("complex64", "float32"), ("float32", "complex64")], ids=str)  # fmt: skip
def test_inputs_and_gates_of_two_dtypes(scans, kinds):
    wide = drawn("a", DTYPES[5] if "complex64" in kinds else DTYPES[3], (2, 307, 70))
    x, y = (z.real.astype(k) if np.dtype(k).kind != "c" else z.astype(k) for z, k in zip(wide[:2], kinds, strict=True))
    state = [z.astype(np.complex64 if "complex64" in kinds else np.float32) for z in wide[2:]]
    state[1] = state[1].astype(np.result_type(x, y) if "complex64" in kinds else x.dtype)
    compare(scans, FUNCTIONS["a"], [x, y, *state], max(BOUND[k] for k in kinds))


def test_a_hard_reset_is_exact(scans):
    """log a = -inf, and NaN stays where it is."""
    x, g, *_ = drawn("g", FLOAT32, (1, 600, 40))
    g[:, 100] = g[:, 400] = -np.inf
    x[:, 50, 7] = np.nan
    out = scans.see(FUNCTIONS["g"](scans.bring(x), scans.bring(g), backend="cuda"))
    others = np.arange(40) != 7
    np.testing.assert_array_equal(out[:, 100, others], x[:, 100, others])
    assert np.isnan(out[0, 50:, 7]).all()
    assert not np.isnan(out[0, :, others]).any()
