"""Each operation of a program against NumPy, on odd sizes, in memory full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from linattn_np.matrix_state.cpu.interpreter.machine import carry_out
from linattn_np.matrix_state.cpu.interpreter.program import INPUTS, MINUS, ONE, TURNED, Program
from linattn_np.runtime.compiled.tiles import FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER

DTYPES = [np.float32, np.float64]
SIZES = [(1, 1, 1), (2, 33, 5), (3, 70, 17), (8, 16, 8), (13, 15, 32), (32, 64, 64), (37, 100, 41)]


class Bench:
    """A program, its memory, and matrices by number."""

    def __init__(self, dtype):
        self.p, self.values = Program(dtype), {}

    def put(self, x):
        """A matrix (or a vector, as rows of one) that holds x."""
        x = np.asarray(x, self.p.dtype)
        name = self.p.matrix(*x.shape) if x.ndim == 2 else self.p.vector(len(x))
        self.values[name] = x
        return name

    def buffer(self, *shape, above=0):
        """A matrix or vector to write to."""
        return self.p.matrix(*shape, above=above) if len(shape) == 2 else self.p.vector(*shape, above=above)

    def n(self, value):
        """A register that holds a number."""
        return self.p.literal(value)

    def run(self):
        """Carry the program out; then `read` shows its matrices."""
        p, size = self.p, self.p.dtype.itemsize
        self.memory = np.full(p.bytes // size + 64, np.nan, p.dtype)
        self.base = -(-self.address(self.memory) // 64) * 64 - self.address(self.memory)
        for name, x in self.values.items():
            self.read(name, *x.shape)[...] = x
        tables = p.table(), p.registers(), p.placed(self.address(self.memory)), np.zeros((1, 7), np.int64)
        tasks = np.zeros((1, INPUTS), np.int64)
        carry_out(p.dtype)(p.dtype.type(1), p.dtype.type(0.5), *map(self.address, tables), self.address(tasks), 0, 1)
        return self

    def read(self, name, m, n=None):
        """A view of a matrix (m, n), or of a vector of m."""
        at, row, _, own = self.p.matrices[name]
        assert own
        flat = self.memory[(self.base + at) // self.p.dtype.itemsize :]
        if n is None:
            return flat[:m]
        return np.lib.stride_tricks.as_strided(flat, (m, n), (row * flat.itemsize, flat.itemsize))

    @staticmethod
    def address(x):
        return x.__array_interface__["data"][0]


def close(x, y, dtype, factor=64):
    np.testing.assert_allclose(x, y, rtol=0, atol=factor * np.finfo(dtype).eps * max(1, np.abs(y).max(initial=0)))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_product(m, n, k, turned, dtype, rng):
    b = Bench(dtype)
    A, B, added, f, h = (rng.standard_normal(s) for s in ((m, k), (k, n), (m, n), m, m))
    out, plain = b.buffer(m, n), b.buffer(m, n)
    left, half = b.put(A.T if turned else A), FULL + TURNED * turned
    sizes = b.n(m), b.n(n), b.n(k)
    right = b.put(B)
    b.p.multiply(left, right, *sizes, out, b.put(f), half, added=b.put(added), added_rows=b.put(h))
    b.p.multiply(left, right, *sizes, plain, MINUS, half)
    b.run()
    close(b.read(out, m, n), f[:, None] * (A @ B) + h[:, None] * added, dtype)
    close(b.read(plain, m, n), -(A @ B), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 7, 8, 19, 32])
def test_half_products_read_one_triangle(m, dtype, rng):
    b, n = Bench(dtype), 21
    L, B, X, Y = (rng.standard_normal(s) for s in ((m, m), (m, n), (m, n), (n, m)))
    L, square = np.tril(L), (b.n(m), b.n(n), b.n(m))
    lower, upper, gram = b.buffer(m, n), b.buffer(m, n), b.buffer(m, m)
    A, right = b.put(L), b.put(B)
    b.p.multiply(A, right, *square, lower, ONE, LEFT_LOWER)
    b.p.multiply(A, right, *square, upper, ONE, LEFT_UPPER + TURNED)
    b.p.multiply(b.put(X), b.put(Y), b.n(m), b.n(m), b.n(n), gram, ONE, OUT_LOWER)
    b.run()
    close(b.read(lower, m, n), L @ B, dtype)
    close(b.read(upper, m, n), L.T @ B, dtype)
    close(np.tril(b.read(gram, m, m)), np.tril(X @ Y), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [8, 16, 40])
@pytest.mark.parametrize("n", [1, 32, 50])
def test_solves(m, n, dtype, rng):
    b = Bench(dtype)
    N, Y = np.tril(rng.uniform(-0.3, 0.3, (m, m)), -1), rng.standard_normal((m, n))
    X, Z = b.put(Y), b.put(Y)
    system = b.put(N)
    b.p.solve(system, X, b.n(m), b.n(n))
    b.p.solve_transposed(system, Z, b.n(m), b.n(n))
    b.run()
    close(b.read(X, m, n), np.linalg.solve(np.eye(m) + N, Y), dtype, 1e3)
    close(b.read(Z, m, n), np.linalg.solve(np.eye(m) + N.T, Y), dtype, 1e3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 33), (32, 64)])
def test_transpose_and_rows(m, n, dtype, rng):
    b = Bench(dtype)
    X, F = rng.standard_normal((2, m, n)).astype(dtype)
    f = rng.standard_normal(m).astype(dtype)
    shapes = {"turned": (n, m), "scaled": (m, n), "times": (m, n), "reach": (m,), "zero": (m, n)}
    names = {name: b.buffer(*shape) for name, shape in shapes.items()}
    x, y, g, total, dots = b.put(X), b.put(F), b.put(f), b.put(F), b.put(f)
    b.p.transpose(x, b.n(m), b.n(n), names["turned"])
    b.p.copy(x, b.n(m), b.n(n), names["scaled"], g)
    b.p.hadamard(x, y, b.n(m), b.n(n), names["times"])
    b.p.add_hadamard(x, y, b.n(m), b.n(n), total)
    b.p.reach(names["reach"], g, g, b.n(m), -1)
    b.p.clear(names["zero"], b.n(0), b.n(m), b.n(n))
    b.p.dots(dots, x, y, b.n(m), b.n(n), -1)
    b.run()
    assert (b.read(names["turned"], n, m) == X.T).all()
    assert (b.read(names["scaled"], m, n) == f[:, None] * X).all()
    assert (b.read(names["times"], m, n) == X * F).all()
    assert (b.read(names["reach"], m) == -(f * f)).all()
    assert (b.read(names["zero"], m, n) == 0).all()
    close(b.read(total, m, n), F + X * F, dtype)
    close(b.read(dots, m), f - (X * F).sum(1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jumps_and_whole_numbers(dtype):
    b = Bench(dtype)
    p, i, total, x = b.p, b.p.register(), b.p.register(), b.put(np.ones(1))
    p.add(i, b.n(0), b.n(0))
    top = p.here()
    p.add(total, total, i)
    p.add(i, i, b.n(1))
    p.less(i, b.n(5), top)  # 0 + 1 + 2 + 3 + 4
    with p.only_if(total, b.n(10)):
        p.copy(x, b.n(1), b.n(1), x, MINUS)
    with p.only_if(b.n(9), total):
        p.copy(x, b.n(1), b.n(1), x, p.same(b.put(np.full(1, 7.0))))
    assert b.run().read(x, 1) == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials(dtype):
    """e^x within 2 ulp, 0 far below, also for -inf; as the decay of channels, which is its only use."""
    x = np.concatenate([-np.logspace(-8, 1.9, 300), [0.0, -np.inf, -1e30, -0.0]])[:, None].astype(dtype)
    b, m = Bench(dtype), len(x)
    W, start, end, carry = b.put(x), b.buffer(m, 1, above=1), b.buffer(m, 1), b.buffer(1)
    b.p.channels(W, b.n(m), b.n(1), start, end, carry)
    found, exact = b.run().read(W, m, 1), np.exp(x.astype(np.longdouble))
    assert (np.abs(found - exact) <= 2 * np.spacing(exact.astype(dtype))).all()
    assert (found[-3:-1] == 0).all()
    assert found[-1] == found[-4] == 1


@pytest.mark.parametrize("K", [5, 32])
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("m", [1, 16, 17, 37])
def test_gram_by_channel_and_its_transpose(m, early, K, rng):
    """Against all pairs, with a reset among the gates; what crosses a gate, too."""
    b = Bench(np.float64)
    X, Y = rng.standard_normal((2, m, K))
    g = -rng.uniform(0, 1, (m, K))
    g[m // 2] = -np.inf
    cotangent = np.tril(rng.standard_normal((m, m)), -early)
    path = np.zeros((m, m, K))  # e^{s(j, i)}, to i - 1 if early
    crossing = np.zeros((m, m, m))  # t, i, j
    for i in range(m):
        for j in range(i + 1 - early):
            path[i, j] = np.exp(g[j + 1 : i + 1 - early].sum(0))
            crossing[j + 1 : i + 1 - early, i, j] = 1
    shapes = {"near": (16, K), "far": (m, K), "farT": (K, m), "out": (m, m), "last": (m, K), "scratch": (40 + 3 * m, K)}
    buffer = {name: b.buffer(*shape) for name, shape in shapes.items()}
    x, y, W, P = b.put(X), b.put(Y), b.put(g), b.put(cotangent)
    dX, dY, dG = (b.put(np.zeros((m, K))) for _ in range(3))
    n, k = b.n(m), b.n(K)
    b.p.channels(W, n, k, b.buffer(m, K, above=1), buffer["last"], b.buffer(K))
    b.p.channel_gram(x, y, W, early, n, k, buffer["out"], buffer["near"], buffer["far"], buffer["farT"])
    b.p.channel_pull(P, x, y, W, early, n, k, dX, dY, dG, buffer["scratch"])
    b.run()
    lower = np.tril(np.ones((m, m)), -early) > 0
    close(b.read(buffer["out"], m, m)[lower], np.einsum("id,jd,ijd->ij", X, Y, path)[lower], np.float64)
    close(b.read(dX, m, K), np.einsum("ij,jd,ijd->id", cotangent, Y, path), np.float64)
    close(b.read(dY, m, K), np.einsum("ij,id,ijd->jd", cotangent, X, path), np.float64)
    close(b.read(dG, m, K), np.einsum("ij,id,jd,ijd,tij->td", cotangent, X, Y, path, crossing), np.float64)
