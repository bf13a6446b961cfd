"""The pieces of compiled loops against NumPy, on odd sizes, in memory full of NaN; with Numba switched off, too."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from linattn_np.matrix_state.cpu.decay import block_gram, block_gram_vjp, crossings, pair_table, rest, tables_of, weigh
from linattn_np.ops import polynomial_maps
from linattn_np.ops.cpu.maps import exponentials, exponentials_vjp, monomials, monomials_vjp, waves, waves_vjp
from linattn_np.ops.cpu.numbers import exp, number
from linattn_np.ops.cpu.products import (
    FULL,
    LEFT_LOWER,
    LEFT_UPPER,
    OUT_LOWER,
    product,
    solve,
    solve_transposed,
    transpose,
)
from linattn_np.ops.cpu.rows import (
    add_dots,
    add_hadamard,
    hadamard,
    inverse_lengths,
    overlap,
    scaled,
    times,
    unit_rows,
    unit_rows_vjp,
    unit_vjp,
)
from linattn_np.ops.cpu.storage import load, stream
from linattn_np.runtime.pieces.memory import address, aligned_empty
from linattn_np.runtime.pieces.piece import JIT, entry, load_pieces, piece, workspace_kind
from linattn_np.runtime.pieces.run import put, stored_array
from linattn_np.runtime.pieces.tiles import sum_of
from linattn_np.runtime.pieces.vectors import BYTES
from linattn_np.runtime.pieces.views import row, rows, transposed
from linattn_np.runtime.pieces.workspace import Matrix, PythonWorkspace, Workspace
from linattn_np.softmax.cpu.stick import log1p_exp
from tests.ops.sheets import Sheet, close, run

DTYPES = [np.float32, np.float64]
SIZES = [(1, 1, 1), (2, 33, 5), (3, 170, 17), (8, 16, 8), (13, 15, 32), (32, 64, 64), (37, 100, 41)]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@piece
def products(w: Sheet):
    product(FULL, w.A, w.B, w.C, w.f, w.D, w.h)
    product(FULL, w.A, w.B, w.D, added=w.D)


@dtypes
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_product(m, n, k, dtype, rng):
    A, B, D, f, h = (rng.standard_normal(s) for s in ((m, k), (k, n), (m, n), m, m))
    w = run(products, dtype, {"m": m, "n": n, "k": k}, A=A, B=B, D=D, f=f, h=h)
    close(w.C, f[:, None] * (A @ B) + h[:, None] * D, dtype)
    close(w.D, A @ B + D, dtype)


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
def halves(w: Sheet):
    product(LEFT_LOWER, w.N, w.D, w.C)
    transpose(w.D, w.T)
    product(OUT_LOWER, w.D, w.T, w.P)
    product(LEFT_UPPER, transposed(w.N), w.D, w.D, added=w.D)


@dtypes
@pytest.mark.parametrize("m", [1, 3, 7, 8, 19, 32])
def test_half_products_read_one_triangle(m, dtype, rng):
    N, D = np.tril(rng.standard_normal((m, m))), rng.standard_normal((m, 21))
    w = run(halves, dtype, {"m": m, "n": 21}, N=N, D=D)
    close(w.C, N @ D, dtype)
    close(np.tril(w.P), np.tril(D @ D.T), dtype)
    assert (D.T.astype(dtype) == w.T).all()


@piece
def across(w: Sheet):
    transpose(rows(w.D, 0, w.how), w.T)


@dtypes
@pytest.mark.parametrize("count", [1, 5, 7])
def test_a_transpose_leaves_no_lane_as_it_was(count, dtype, rng):
    """Lanes behind the last row repeat it: they meet zeros in products, where what was there before may be NaN."""
    D, lane = rng.standard_normal((16, 21)).astype(dtype), BYTES // np.dtype(dtype).itemsize
    w = run(across, dtype, {"m": 16, "n": 21, "how": count}, D=D)
    assert (w.T[:, :count] == D[:count].T).all()
    assert (w.T[:, count:lane] == D[count - 1 : count].T).all()


@piece
def systems(w: Sheet):
    solve(w.N, w.C)
    solve_transposed(w.N, w.D)


@dtypes
@pytest.mark.parametrize("m", [1, 8, 13, 40])
@pytest.mark.parametrize("n", [1, 32, 50])
def test_solves(m, n, dtype, rng):
    N, Y = np.tril(rng.uniform(-0.3, 0.3, (m, m)), -1), rng.standard_normal((m, n))
    w = run(systems, dtype, {"m": m, "n": n}, N=N, C=Y, D=Y)
    close(w.C, np.linalg.solve(np.eye(m) + N, Y), dtype, 1e3)
    close(w.D, np.linalg.solve(np.eye(m) + N.T, Y), dtype, 1e3)


@piece
def row_sums(w: Sheet):
    scaled(w.X, w.f, w.Z)
    hadamard(w.X, w.Y, w.W)
    add_hadamard(w.X, w.Y, w.dX)
    times(-1.0, w.f, w.h, w.u)
    add_dots(w.X, w.Y, False, -1.0, w.f)
    w.start[0] = overlap(w.X, w.Y)
    w.start[1] = sum_of(row(w.X, 0), w.k)


@dtypes
@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 33), (32, 64)])
def test_rows(m, k, dtype, rng):
    X, Y = rng.standard_normal((2, m, k)).astype(dtype)
    f, h = rng.standard_normal((2, m)).astype(dtype)
    w = run(row_sums, dtype, {"m": m, "k": k}, X=X, Y=Y, dX=Y, f=f, h=h)
    assert (f[:, None] * X == w.Z).all()
    assert (w.W == X * Y).all()
    assert (w.u == -(f * h)).all()
    close(w.dX, Y + X * Y, dtype)
    close(w.f, f - (X * Y).sum(1), dtype)
    close(w.start[:2], [(X * Y).sum(), X[0].sum()], dtype, 640)


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
def tables(w: Sheet):
    pair_table(w.f, w.sums, w.P, w.start, w.h)
    weigh(w.N, w.P, True, w.f)


@piece
def crossed(w: Sheet):
    crossings(w.N, w.f, w.h, 0.5, w.u)


@pytest.mark.parametrize("m", [1, 16, 17, 37])
def test_what_crosses_a_gate(m, rng):
    """dg_t = sum_{i >= t > j} N_ij + sum_{i >= t} f_i + sum_{j < t} h_j + 1/2"""
    N, f, h = np.tril(rng.standard_normal((m, m))), rng.standard_normal(m), rng.standard_normal(m)
    w = run(crossed, np.float64, {"m": m}, f=f, h=h, N=N)
    close(w.u, [N[t:, :t].sum() + f[t:].sum() + h[:t].sum() + 0.5 for t in range(m)], np.float64)


@pytest.mark.parametrize("m", [1, 16, 17, 37])
def test_tables_of_a_scalar_decay(m, rng):
    g = -rng.uniform(0, 1, m)
    g[m // 2] = -np.inf
    N = rng.standard_normal((m, m))
    w = run(tables, np.float64, {"m": m}, f=g, N=N)
    E = np.array([[np.exp(g[j + 1 : i + 1].sum()) for j in range(m)] for i in range(m)])
    lower = np.tril(np.ones((m, m))) > 0
    close(w.P[lower], E[lower], np.float64)
    close(w.start, np.exp([g[:i].sum() for i in range(m + 1)]), np.float64)
    close(w.h, E[-1], np.float64)
    with np.errstate(invalid="ignore"):
        weighed = np.where(np.tril(np.ones((m, m)), -1) > 0, g[:, None] * (N * E), 0)
    np.testing.assert_allclose(np.where(np.isnan(w.N), 0, w.N), np.where(np.isnan(weighed), 0, weighed), rtol=1e-12)


@piece
def channel_grams(w: Sheet):
    tables_of(w.W, w.first, w.first_before, w.last, row(w.scratch, 0))
    block_gram(w.X, w.Y, w.W, w.how, w.N, w.near, w.far, w.farT)
    block_gram_vjp((w.W, w.dW, w.scratch), w.P, w.X, w.Y, w.how, w.dX, w.dY)


@pytest.mark.parametrize("k", [8, 32])
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("m", [1, 16, 17, 37])
def test_gram_by_channel_and_its_transpose(m, early, k, rng):
    """Against all pairs, with a reset among the gates; what crosses a gate, too."""
    X, Y = rng.standard_normal((2, m, k))
    g, zero = -rng.uniform(0, 1, (m, k)), np.zeros((m, k))
    g[m // 2] = -np.inf
    P = np.tril(rng.standard_normal((m, m)), -early)
    path = np.zeros((m, m, k))  # e^{s(j, i)}, to i - 1 if early
    crossing = np.zeros((m, m, m))  # t, i, j
    for i in range(m):
        for j in range(i + 1 - early):
            path[i, j] = np.exp(g[j + 1 : i + 1 - early].sum(0))
            crossing[j + 1 : i + 1 - early, i, j] = 1
    given = {"X": X, "Y": Y, "W": g, "P": P, "dX": zero, "dY": zero, "dW": zero}
    w = run(channel_grams, np.float64, {"m": m, "k": k, "how": early}, **given)
    lower = np.tril(np.ones((m, m)), -early) > 0
    close(w.N[lower], np.einsum("id,jd,ijd->ij", X, Y, path)[lower], np.float64)
    close(w.dX, np.einsum("ij,jd,ijd->id", P, Y, path), np.float64)
    close(w.dY, np.einsum("ij,id,ijd->jd", P, X, path), np.float64)
    close(w.dW, np.einsum("ij,id,jd,ijd,tij->td", P, X, Y, path, crossing), np.float64)


@piece
def polynomials(w: Sheet):
    monomials(w.X, w.n, w.segments, w.weights, w.A)
    monomials_vjp(w.X, w.n, w.segments, w.weights, w.A, w.Z, w.dX)


@dtypes
@pytest.mark.parametrize("coefficients", [(1.0, 1.0, 0.5), (0.0, 0.0, 1.0), (0.3, 2.0), (1.0, 1.0, 0.5, 1 / 6)])
@pytest.mark.parametrize(("m", "K"), [(1, 1), (5, 7), (13, 20)])
def test_monomials_and_their_transpose(m, K, coefficients, dtype, rng):
    weights, segments = polynomial_maps.segments(K, coefficients)
    width, skipped = len(weights), len(weights) - polynomial_maps.powers_width(K, coefficients)
    x, dphi = rng.standard_normal((m, K)), rng.standard_normal((m, width - skipped))
    k = max(width, K) + 16
    pad = lambda y, left=0: np.pad(y, ((0, 0), (left, k - left - y.shape[1])))  # noqa: E731
    sizes = {"m": m, "n": K, "k": k, "how": len(segments), "count": width + 64}
    w = run(polynomials, dtype, sizes, X=pad(x), Z=pad(dphi, skipped), dX=pad(x * 0), segments=segments,
            weights=np.pad(weights, (0, 64)))  # fmt: skip
    close(w.A[:, skipped:width], polynomial_maps.powers(np, x, coefficients), dtype)
    close(w.dX[:, :K], polynomial_maps.powers_vjp(np, x, coefficients, dphi), dtype, 500)


@piece
def random_maps(w: Sheet):
    exponentials(w.C, w.X, w.weights)
    exponentials_vjp(w.D, w.C, w.weights, w.f)
    inverse_lengths(w.X, w.k, w.h)
    unit_vjp(w.X, w.k, w.h, w.dX)
    unit_rows(w.X, w.Z, number(w.X, 0))
    unit_rows_vjp(w.X, w.Y, w.dY, number(w.X, 0))


@dtypes
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 7, 3), (8, 16, 16), (13, 20, 33)])
def test_exponentials_lengths_and_their_transposes(m, k, n, dtype, rng):
    x, P, d = (rng.standard_normal(s) for s in ((m, k), (m, n), (m, n)))
    w = run(random_maps, dtype, {"m": m, "k": k, "n": n, "count": 2}, X=x, C=P, D=d, weights=[0.3, 0.7], Y=x[::-1],
            dX=x[::-1])  # fmt: skip
    phi = np.exp(P - 0.3 * np.sum(x**2, -1, keepdims=True) - 0.7)
    close(w.C, phi, dtype)
    close(w.D, d * phi, dtype)
    close(w.f, -0.6 * np.sum(d * phi, -1), dtype)
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    y, dy = x / length, x[::-1]
    close(w.h, 1 / length[:, 0], dtype)
    close(w.Z, y, dtype)
    for found in (w.dX, w.dY):
        close(found, (dy - y * np.sum(y * dy, -1, keepdims=True)) / length, dtype)


@piece
def angles(w: Sheet):
    waves(w.C, w.n, w.x, w.A)
    waves_vjp(w.X, w.A, w.n, w.D)


@dtypes
def test_sines_and_cosines(dtype, rng):
    """Of large angles too; what is not finite gives NaN."""
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
                                   ["tests/matrix_state/cpu/test_loops.py", "-k", "test_every_cell and equal"]],
                         ids=["pieces", "kernels"])  # fmt: skip
def test_with_numba_switched_off(tests):
    """Every piece as Python with NumPy's bounds checks, the tiles too."""
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *tests], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout or "100%" in done.stdout
