"""Compiled pieces: bits, accuracy and edges that no call of a variant shows; with Numba switched off, too."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.matrix_state.cpu.decay import rest
from linattn_np.ops.cpu.maps import waves, waves_vjp
from linattn_np.ops.cpu.numbers import exp
from linattn_np.ops.cpu.products import FULL, product, transpose
from linattn_np.ops.cpu.storage import load, stream
from linattn_np.runtime.pieces.memory import address, aligned_empty
from linattn_np.runtime.pieces.piece import JIT, entry, load_pieces, piece, workspace_kind
from linattn_np.runtime.pieces.run import put, stored_array
from linattn_np.runtime.pieces.vectors import BYTES
from linattn_np.runtime.pieces.views import rows
from linattn_np.runtime.pieces.workspace import Matrix, PythonWorkspace, Workspace
from linattn_np.softmax.cpu.stick import log1p_exp
from tests.ops.sheets import Sheet, close, run

DTYPES = [np.float32, np.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@piece
def products(w: Sheet):
    product(FULL, w.A, w.B, w.C, w.f, w.D, w.h)
    product(FULL, w.A, w.B, w.D, added=w.D)


@pytest.mark.skipif(not JIT, reason="Numba is switched off: BLAS adds in another order")
@dtypes
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_few_rows_have_the_bits_of_many(m, dtype, rng):
    """Their tile has another shape."""
    A, B, D, f, h = (rng.standard_normal(s) for s in ((9, 40), (40, 150), (9, 150), 9, 9))
    each = [run(products, dtype, {"m": count, "n": 150, "k": 40}, A=A[:count], B=B, D=D[:count], f=f[:count],
                h=h[:count]) for count in (m, 9)]  # fmt: skip
    few, many = ((w.C[:m].tobytes(), w.D[:m].tobytes()) for w in each)
    assert few == many


@piece
def across(w: Sheet):
    transpose(rows(w.D, 0, w.how), w.T)


@dtypes
@pytest.mark.parametrize("count", [1, 5, 7])
def test_a_transpose_leaves_no_lane_as_it_was(count, dtype, rng):
    """Lanes past the last row repeat it: products multiply them by 0, and stale memory may be NaN."""
    D, lane = rng.standard_normal((16, 21)).astype(dtype), BYTES // np.dtype(dtype).itemsize
    w = run(across, dtype, {"m": 16, "n": 21, "how": count}, D=D)
    assert (w.T[:, :count] == D[:count].T).all()
    assert (w.T[:, count:lane] == D[count - 1 : count].T).all()


@piece
def exps(w: Sheet):
    for i in range(w.m):
        w.h[i] = exp(w.f[i])


@dtypes
def test_exponentials(dtype):
    """e^x within 2 ulp, 0 far below, also for -inf."""
    x = np.concatenate([-np.logspace(-8, 1.9, 300), [0.0, -np.inf, -1e30, -0.0, np.nan, 800.0]]).astype(dtype)
    w = run(exps, dtype, {"m": len(x)}, f=x)
    found = w.h
    exact = np.exp(x[:-2].astype(np.longdouble))
    assert (np.abs(found[:-2] - exact) <= 2 * np.spacing(exact.astype(dtype))).all()
    assert (found[-5:-3] == 0).all()
    assert found[-3] == found[-6] == 1
    assert np.isnan(found[-2])
    assert found[-1] == np.inf


@piece
def logs(w: Sheet):
    for i in range(w.m):
        w.h[i] = log1p_exp(w.f[i])


@dtypes
def test_log_of_one_and_an_exponential(dtype):
    """log(1 + e^x) of x <= 0 within 4 ulp, also where it is e^x; 0 at -inf, NaN stays."""
    x = np.concatenate([-np.logspace(-8, 1.9, 300), [0.0, -np.inf, np.nan]]).astype(dtype)
    found = run(logs, dtype, {"m": len(x)}, f=x).h
    exact = np.log1p(np.exp(x[:-1].astype(np.longdouble)))
    assert (np.abs(found[:-1] - exact) <= 4 * np.spacing(exact.astype(dtype))).all()
    assert np.isnan(found[-1])


@piece
def angles(w: Sheet):
    waves(w.C, w.n, w.x, w.A)
    waves_vjp(w.X, w.A, w.n, w.D)


@dtypes
def test_sines_and_cosines(dtype, rng):
    """Of large angles too; infinite angles give NaN."""
    special = [0.0, -0.0, 1e-30, np.pi / 4, np.pi / 2, np.pi, -3e3, 1e4, np.inf, np.nan]
    x = np.concatenate([special, 40 * rng.standard_normal(23)])
    n, d = len(x), rng.standard_normal(2 * len(x))
    w = run(angles, dtype, {"n": n, "k": 2 * n}, x=0.25, C=x[None], X=d[None])
    x = x.astype(dtype).astype(np.float64)  # angles as they are rounded
    with np.errstate(invalid="ignore"):
        s, c = 0.25 * np.sin(x), 0.25 * np.cos(x)
    finite = np.isfinite(x)
    assert np.isnan(w.A[0, :n][~finite]).all()
    close(w.A[0, :n][finite], s[finite], dtype, 4)
    close(w.A[0, n:][finite], c[finite], dtype, 4)
    close(w.D[0][finite], (d[:n] * c - d[n:] * s)[finite], dtype)


LOADED = Workspace("loaded", ("m", "k", "batch", "head", "t", "column", "count"), (), ("y",),
                   {"given": {"X": Matrix("m", "k"), "factors": Matrix("m")}})  # fmt: skip
Loaded = workspace_kind(LOADED)


@piece
def loads(w: Loaded):
    load(w.y, (w.batch, w.head, w.t), (w.column, w.count), w.X)


def execute(kernel, table, dtype):
    load_pieces((kernel,), np.dtype(dtype).name)
    if JIT:
        entry(kernel, np.dtype(dtype).name)(address(table))
    else:
        kernel(PythonWorkspace(LOADED, table, dtype))


@piece
def streams(w: Loaded):
    stream(w.X, w.y, (w.batch, w.head, w.t), (w.column, w.count), w.factors)


@dtypes
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tokens", [9, 2048])
def test_rows_written_past_the_caches(tokens, first, dtype, rng):
    """diag(f) X in its place and nowhere else: in arrays large and small, aligned or not."""
    y = aligned_empty((tokens * 3 * 64 + 1,), np.dtype(dtype))[first : first + tokens * 192].reshape(1, tokens, 3, 64)
    y[...] = before = rng.standard_normal(y.shape).astype(dtype)
    X, f = rng.standard_normal((5, 64)).astype(dtype), rng.standard_normal(5).astype(dtype)
    table = np.zeros(LOADED.size, np.int64)
    sizes = {"m": 5, "k": 64, "head": 1, "t": 3, "count": 64, "X": X, "factors": f}
    put(LOADED, table, sizes)[LOADED.slots["y"] :][:11] = stored_array(y, y.strides, 1)
    execute(streams, table, dtype)
    before[0, 3:8, 1] = f[:, None] * X
    assert (y == before).all()


@dtypes
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_loads_of_any_storage(kind, strided, dtype, rng):
    """Exact, subnormals too; zeros to the right; heads that share one."""
    y = rng.standard_normal((2, 9, 3, 26)).astype(kind)
    y[0, 0, 0, :4] = [np.inf, 6e-8, -6e-8, 0]
    y = y[:, ::-1, :, ::2] if strided else y[..., :13]
    table = np.zeros(LOADED.size, np.int64)
    sizes = {"m": 5, "k": 16, "batch": 1, "head": 5, "t": 3, "column": 2, "count": 11}
    X = np.full((5, 16), np.nan, dtype)
    for name, size in sizes.items():
        table[LOADED.slots[name]] = size
    at = LOADED.slots["y"]
    table[at : at + 11] = stored_array(y, y.strides, 2)
    table[LOADED.slots["X"] : LOADED.slots["X"] + 2] = address(X), X.strides[0]
    execute(loads, table, dtype)
    assert (X[:, :11] == y[1, 3:8, 2, 2:13].astype(dtype)).all()
    assert (X[:, 11:] == 0).all()


@piece
def wide_dots(w: Sheet):
    rest(w.X, w.X, w.P, w.f, w.N)


def test_sums_in_float64_of_float32(rng):
    x = np.full(32, np.float32(32**-0.5))
    w = run(wide_dots, np.float32, {"m": 2, "k": 32}, X=np.stack([x, x]), P=np.ones((2, 2)), f=np.full(2, 2))
    assert w.N[1, 0] == np.float32(np.sum(x.astype(np.float64) ** 2) - 1) != 0


@pytest.mark.skipif(not JIT, reason="Numba is switched off")
def test_a_piece_in_a_users_own_compiled_function(rng):
    import numba

    load_pieces((product,), "float32")

    @numba.njit
    def twice(A, B, out):
        product(FULL, A, B, out)
        product(FULL, A, B, out, added=out)

    A, B, out = rng.standard_normal((3, 20, 20), np.float32)
    any_layout = numba.types.Array(numba.float32, 2, "A")
    twice.compile(numba.void(any_layout, any_layout, any_layout))
    twice(A[:, ::1], B, out)
    close(out, 2 * A.astype(np.float64) @ B, np.float32)


@pytest.mark.skipif(not JIT, reason="Numba is switched off")
@pytest.mark.parametrize("tests", [["tests/ops/test_cpu_pieces.py"],
                                   ["tests/matrix_state/cpu/test_loops.py", "-k", "test_every_cell and equal"],
                                   ["tests/ops/test_formulas.py", "-k", "test_a_formula or storage or apart"],
                                   ["tests/nn/test_pieces.py", "-k", "(definition or central) and numba and not long"]],
                         ids=["pieces", "kernels", "formulas", "layers"])  # fmt: skip
def test_with_numba_switched_off(tests):
    """Every piece as Python with NumPy's bounds checks, the tiles too."""
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *tests], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout or "100%" in done.stdout
