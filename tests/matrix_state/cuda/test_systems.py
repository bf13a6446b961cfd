"""The systems of chunks by kernels, emulated and on a GPU, against exact solutions in NumPy and float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.systems import calls, plan
from linattn_np.matrix_state.readouts import systems
from linattn_np.matrix_state.readouts.solved import SolvedInputs
from linattn_np.matrix_state.readouts.systems import Solver
from linattn_np.matrix_state.types import Plan
from linattn_np.runtime.cuda import launch
from linattn_np.runtime.shapes import Sequence
from linattn_np.testing import relative_error
from tests.cases import parts
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token import host as step_calls

launched, public = step_calls.launched, step_calls.public

CASES = {  # sizes, options
    "bfloat16": ({"T": 37, "K": 40}, {}),
    "a whole width": ({"T": 33, "K": 64}, {}),
    "128": ({"T": 34, "K": 128, "H": 1, "B": (1,)}, {}),
    "float16": ({"T": 35, "K": 24}, {"dtype": np.float16}),
    "float32": ({"T": 35, "K": 40}, {"dtype": np.float32}),
    "an odd width": ({"T": 35, "K": 7}, {"dtype": np.float32}),
    "groups": ({"T": 33, "K": 16, "H": 4, "Hq": 2, "Hk": 2}, {}),
    "one key": ({"T": 33, "K": 16, "H": 2, "Hk": 1}, {}),
    "more queries": ({"T": 33, "K": 16, "H": 2, "Hq": 4}, {}),
    "a constant ridge": ({"T": 33, "K": 16}, {"constant": True}),
    "a state": ({"T": 40, "K": 16}, {"state": True}),
    "ragged": ({"T": 72, "K": 16}, {"state": True, "ends": [0, 0, 3, 38, 38, 71, 72]}),
    "resets": ({"T": 40, "K": 16}, {"g": "reset", "state": True}),
    "no decay": ({"T": 40, "K": 16}, {"g": "none"}),
}
BOUNDS = {"bfloat16": 6e-5, "float16": 6e-5, "float32": 1e-6}


def drawn(name, seed=0, chunk=None):
    """(inputs in float64, Z, sequences, dtype of the caller)."""
    sizes, how = CASES[name]
    rng, dtype = np.random.default_rng(seed), how.get("dtype", ml_dtypes.bfloat16)
    ends = how.get("ends")
    sizes = {"H": 2, "B": (1 if ends else 2,), **sizes}
    x = la.testing.sample(la.mesa_net, rng, V=4, **sizes)
    x = {n: y.astype(dtype if n in "qk" else np.float32).astype(np.float64) for n, y in x.items()}
    g = {"reset": np.where(rng.uniform(size=x["g"].shape) < 0.1, -np.inf, x["g"]), "none": 0 * x["g"]}.get(
        how.get("g"), x["g"]
    )
    ridge = x["ridge"][0, :1] if how.get("constant") else x["ridge"]
    N, (H, K) = len(ends) - 1 if ends else len(x["v"]), (x["v"].shape[2], x["k"].shape[3])
    keys = rng.standard_normal((N, H, K, 3))
    Z = np.asarray(keys @ np.swapaxes(keys, -1, -2), np.float32).astype(np.float64) if how.get("state") else None
    sequences = (
        [Sequence(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(ends))]
        if ends
        else [Sequence(None, 0, sizes["T"])]
    )
    inputs = SolvedInputs(x["q"], x["k"], x["v"], g[..., None], x["beta"][..., None], ridge)
    return inputs, Z, tuple(sequences), np.dtype(dtype)


def exact(inputs, Z, sequences):
    host = Plan(np, np.float64, 1.0, sequences=sequences)
    return systems.solve(inputs.memory(np, inputs.k), inputs.ridge, Solver(True, 0, 0.0), host, Z)


def formed(inputs, Z):
    """Z_t (B, T, H, K, K) of a batch."""
    found = []
    for t in range(inputs.k.shape[1]):
        k, beta = inputs.k[:, t], inputs.beta[:, t]
        Z = np.exp(inputs.g[:, t])[..., None] * Z + k[..., :, None] * (beta * k)[..., None, :]
        found.append(Z)
    return np.stack(found, axis=1)


@pytest.fixture
def narrow(monkeypatch, device):  # noqa: F811
    """Chunks of 32 tokens, that there are several; the shared memory of an H200."""
    if device.launched is not None:
        monkeypatch.setattr(launch, "shared_limit", lambda: 227 << 10)
        plan.kernels_of.cache_clear()
        monkeypatch.setattr("linattn_np.matrix_state.policy.SYSTEM_CHUNKS", (32,))
    yield device
    plan.kernels_of.cache_clear()


def solved(device, inputs, Z, sequences, dtype, solver=None):  # noqa: F811
    solver = Solver(False, 300, 0.0, False, dtype) if solver is None else solver
    brought = [None if y is None else device.bring(np.asarray(y, np.float32)) for y in inputs[:6]]
    how = Plan(device.xp, device.xp.float32, 1.0, sequences=sequences)
    x = SolvedInputs(*brought, solver)
    assert calls.unsupported_reason(x, how) is None
    found = calls.solve(x, how, None if Z is None else device.bring(np.asarray(Z, np.float32)))
    return [np.array(device.see(y)) for y in found]


@pytest.mark.parametrize("name", CASES)
def test_they_are_the_exact_solutions(narrow, name):
    inputs, Z, sequences, dtype = drawn(name)
    expected, end = exact(inputs, Z, sequences)
    found = solved(narrow, inputs, Z, sequences, dtype)
    assert relative_error(found[0], expected) <= BOUNDS[dtype.name]
    assert relative_error(found[1], end) <= 1e-6


def test_a_transposed_state_is_not_the_state(narrow):
    """Rows are multiplied from the left, as the adjoint needs it: Z need not be symmetric in its last bits."""
    inputs, Z, sequences, dtype = drawn("a state")
    Z = Z + 0.1 * np.triu(np.ones(Z.shape[-2:]), 1)
    expected, end = exact(inputs, Z, sequences)
    found = solved(narrow, inputs, Z, sequences, dtype, Solver(False, 1, 0.0, False, dtype))
    transposed = solved(narrow, inputs, np.swapaxes(Z, -1, -2), sequences, dtype, Solver(False, 1, 0.0, False, dtype))
    assert relative_error(found[1], end) <= 1e-6
    A, q = formed(inputs, Z)[0, 0, 0] + np.diag(inputs.ridge[0, 0, 0]), inputs.q[0, 0, 0]
    for x, B in ((found[0], A), (transposed[0], A.T)):
        assert relative_error(x[0, 0, 0], q * (q @ q) / (q @ (q @ B))) <= 1e-4  # one step
    assert expected.shape == found[0].shape


@pytest.mark.parametrize("name", ["bfloat16", "ragged"])
def test_bits_do_not_depend_on_other_tokens(narrow, name):
    """Alone as in a batch; and no later token changes an earlier solution."""
    inputs, Z, sequences, dtype = drawn(name)
    x, end = solved(narrow, inputs, Z, sequences, dtype)
    if name == "ragged":
        s = sequences[2]
        cut = lambda y: y[:, s.start : s.stop]  # noqa: E731
        alone = solved(
            narrow, SolvedInputs(*map(cut, inputs[:6])), Z[2:3], (Sequence(None, 0, s.stop - s.start),), dtype
        )
        assert np.array_equal(alone[0], cut(x))
        assert np.array_equal(alone[1], end[2:3])
        return
    first = SolvedInputs(*(y[:1] for y in inputs[:6]))
    alone = solved(narrow, first, None, sequences, dtype)
    assert np.array_equal(alone[0], x[:1])
    cut = SolvedInputs(*(y[:1, :20] for y in inputs[:6]))
    earlier = solved(narrow, cut, None, (Sequence(None, 0, 20),), dtype)
    assert np.array_equal(earlier[0], x[:1, :20])


@pytest.mark.parametrize("tolerance", [0.3, 1e-3])
def test_a_row_stops_at_its_own_residual(narrow, tolerance):
    inputs, Z, sequences, dtype = drawn("a state")
    found = solved(narrow, inputs, Z, sequences, dtype, Solver(False, 100, tolerance, False, dtype))[0]
    A = formed(inputs, Z) + inputs.ridge[..., None] * np.eye(inputs.k.shape[-1])
    rest = inputs.q - np.einsum("bthk,bthkj->bthj", found, A)
    share = np.linalg.norm(rest, axis=-1) / np.linalg.norm(inputs.q, axis=-1)
    assert share.max() <= tolerance * (1 + 1e-3)
    assert share.max() > 1e-2 * tolerance


def test_not_a_number_stays_in_its_row_or_after_it(narrow):
    inputs, Z, sequences, dtype = drawn("bfloat16")
    q = inputs.q.copy()
    q[0, 20, 1, 3] = np.nan
    found, _ = solved(narrow, inputs._replace(q=q), Z, sequences, dtype, Solver(False, 5, 0.0, False, dtype))
    few, _ = solved(narrow, inputs, Z, sequences, dtype, Solver(False, 5, 0.0, False, dtype))
    assert np.isnan(found[0, 20, 1]).all()
    few[0, 20, 1] = found[0, 20, 1]
    np.testing.assert_array_equal(found, few)
    assert np.isfinite(np.delete(found, 20, axis=1)).all()


@pytest.mark.parametrize("name", ["a state", "ragged", "resets"])
def test_a_ridge_of_zero(narrow, name):
    """Where NumPy finds every system regular, solutions are its own; singular ones change no other head or row."""
    inputs, Z, sequences, dtype = drawn(name)
    zero, whole = np.zeros_like(inputs.ridge), Z + np.eye(Z.shape[-1])
    g = np.maximum(inputs.g, -0.05)
    regular = inputs._replace(ridge=zero, g=g)
    expected, _ = exact(regular, whole, sequences)
    found = solved(narrow, regular, whole, sequences, dtype)
    assert relative_error(found[0], expected) <= BOUNDS[dtype.name]
    part = inputs.ridge.copy()
    part[:, 3, 1] = 0
    Z[:, 1] = 0
    singular = solved(narrow, inputs._replace(ridge=part), Z, sequences, dtype)
    others = solved(narrow, inputs, Z, sequences, dtype)
    for x, y in zip(singular, others, strict=True):
        if x.ndim == 4 and x.shape[1] == inputs.q.shape[1]:
            x[:, 3, 1] = y[:, 3, 1]
        np.testing.assert_array_equal(x, y)


REFUSED = {
    "exact": ({}, {}, "iterate"),
    "wide": ({"K": 129}, {}, "do not fit"),
    "float64": ({}, {"dtype": np.float64}, "float32"),
    "a chunk size": ({}, {"chunk_size": 16}, "choose their own"),
    "positions": ({}, {"states_at": (3,)}, "at positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_they_do_not_cover_is_said(narrow, name):
    sizes, how, words = REFUSED[name]
    x = la.testing.sample(la.mesa_net, np.random.default_rng(0), B=(1,), T=9, H=2, **{"K": 8, "V": 4, **sizes})
    x = {n: narrow.bring(y.astype(np.float32)) for n, y in x.items()}
    given = Plan(narrow.xp, how.get("dtype", narrow.xp.float32), 1.0, sequences=(Sequence(None, 0, 9),))
    given = given._replace(**{n: y for n, y in how.items() if n != "dtype"})
    solver = Solver(name == "exact", 5, 0.0, False, np.dtype(np.float32))
    inputs = SolvedInputs(x["q"], x["k"], x["v"], x["g"][..., None], x["beta"][..., None], x["ridge"], solver)
    assert words in calls.unsupported_reason(inputs, given)


@pytest.fixture
def tokens(public, monkeypatch):
    """Public functions on arrays that look like CuPy's; a few tokens, that the core has twins for."""
    plan.kernels_of.cache_clear()
    monkeypatch.setattr("linattn_np.matrix_state.policy.SYSTEM_CHUNKS", (32,))
    yield public
    plan.kernels_of.cache_clear()


ELEMENTS = [(np.float32, 1e-5, {"solver": "conjugate_gradients"}), (ml_dtypes.bfloat16, 2**-6, {})]


@pytest.mark.parametrize(("dtype", "bound", "options"), ELEMENTS, ids=["float32", "bfloat16"])
def test_the_function_on_arrays_that_look_like_cupys(tokens, monkeypatch, dtype, bound, options):
    """Outputs, states and gradients are NumPy's; repeated calls have the same bits; `explain` names the kernels."""
    step_calls.backward_by_array_calls(monkeypatch)
    x = la.testing.sample(la.mesa_net, np.random.default_rng(0), B=(1,), T=9, H=2, K=8, V=8)
    x = {n: y.astype(dtype if n in "qkv" else np.float32) for n, y in x.items()}
    wide = {n: y.astype(np.float64) for n, y in x.items()}
    out, pull = la.vjp(la.mesa_net, **wide, solver="exact", return_state=True)
    dout = np.cos(np.arange(out[0].size)).reshape(out[0].shape).astype(dtype)
    expected = [*parts(out), *(y for y in pull(dout.astype(np.float64)) if y is not None)]
    bits = []
    for _ in range(3):
        there = {n: stub(y) for n, y in x.items()}
        found, back = la.vjp(la.mesa_net, **there, return_state=True, **options)
        results = [*parts(found), *(y for y in back(stub(dout)) if y is not None)]
        bits.append([np.asarray(y).tobytes() for y in results])
        for y, z in zip(results, expected, strict=True):
            assert np.abs(np.asarray(y, np.float64) - z).max() <= bound * np.abs(z).max()
    assert bits[0] == bits[1] == bits[2]
    assert "a kernel for chunks of 32 tokens" in la.explain(la.mesa_net, **there, **options).reason
    assert "a kernel for chunks" not in la.explain(la.mesa_net, **there, solver="exact").reason


GPU_CASES = [(np.float32, 1e-5), (np.float16, 2**-8), (ml_dtypes.bfloat16, 2**-6)]


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 60, 64, 100, 128])
@pytest.mark.parametrize(("dtype", "bound"), GPU_CASES, ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 0, 3, 130, 259, 300]}], ids=["batch", "ragged"])
def test_outputs_states_and_gradients_on_a_gpu(cp, K, dtype, bound, options):
    """Against NumPy in float64 and exact solutions; the same bits from repeated calls."""
    rng = np.random.default_rng(0)
    x = la.testing.sample(la.mesa_net, rng, B=(1 if options else 2,), T=300, H=2, K=K, V=K)
    narrow = {n: y.astype(dtype if n in "qkv" else np.float32) for n, y in x.items()}
    wide = {n: y.astype(np.float64) for n, y in narrow.items()}
    out, pull = la.vjp(la.mesa_net, **wide, solver="exact", backend="chunks", return_state=True, **options)
    dout = rng.standard_normal(out[0].shape).astype(dtype)
    expected = [*parts(out), *(y for y in pull(dout.astype(np.float64)) if y is not None)]
    results = []
    for _ in range(3):
        there = {n: cp.asarray(y) for n, y in narrow.items()}
        found, back = la.vjp(
            la.mesa_net, **there, solver="conjugate_gradients", iterations=100, return_state=True, **options
        )
        results.append([y.get() for y in (*parts(found), *(y for y in back(cp.asarray(dout)) if y is not None))])
    for a, *others, b in zip(*results, expected, strict=True):
        assert np.abs(a.astype(np.float64) - b).max() <= bound * np.abs(b).max()
        assert all(a.tobytes() == c.tobytes() for c in others)
