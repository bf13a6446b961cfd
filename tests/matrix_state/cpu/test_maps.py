"""The operations of feature maps, of averages and of fading values alone, in memory full of NaN."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

import linattn_np as la
from linattn_np.matrix_state.cpu.interpreter.program import SCALE
from linattn_np.ops import polynomial_maps
from linattn_np.testing import relative_error
from tests.matrix_state.cpu.test_interpreter import DTYPES, Bench, close, rng  # noqa: F401

SIZES = [(1, 1, 1), (5, 7, 3), (8, 16, 16), (13, 20, 33)]  # rows, channels, features


class Whole(Bench):
    """A bench whose matrices may hold whole numbers."""

    def whole(self, x):
        """Memory that holds whole numbers in a row."""
        name = self.p.vector(x.size, size=8)
        self.wholes = {**getattr(self, "wholes", {}), name: x.ravel()}
        return name

    def read(self, name, m, n=None):
        for of, x in self.wholes.items():
            at = (self.base + self.p.matrices[of][0]) // self.p.dtype.itemsize
            self.memory[at:].view(np.int64)[: x.size] = x
        return super().read(name, m, n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coefficients", [(1.0, 1.0, 0.5), (0.0, 0.0, 1.0), (0.3, 2.0), (1.0, 1.0, 0.5, 1 / 6)])
@pytest.mark.parametrize(("m", "K"), [(1, 1), (5, 7), (8, 16), (13, 20)])
def test_monomials_and_their_transpose(m, K, coefficients, dtype, rng):  # noqa: F811
    b, x = Whole(dtype), rng.standard_normal((m, K))
    weights, segments = polynomial_maps.segments(K, coefficients)
    M = polynomial_maps.powers_width(K, coefficients)
    skipped, slack = len(weights) - M, b.p.lane
    dphi = rng.standard_normal((m, M))
    X, W = b.put(np.pad(x, ((0, 0), (0, slack)))), b.put(np.pad(weights, (0, 64)))
    F, dX = b.buffer(m, len(weights) + slack), b.put(np.zeros((m, K + slack)))
    dF = b.put(np.pad(dphi, ((0, 0), (skipped, slack))))
    table, count = b.whole(segments), b.n(len(segments))
    b.p.monomials(X, table, count, W, b.n(m), b.n(K), F)
    b.p.monomials_pull(X, table, count, W, b.n(m), b.n(K), F, dF, dX)
    b.run()
    phi = polynomial_maps.powers(np, x, coefficients)
    close(b.read(F, m, len(weights))[:, skipped:], phi, dtype)
    close(b.read(dX, m, K), polynomial_maps.powers_vjp(np, x, coefficients, dphi), dtype, 500)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "K", "M"), SIZES)
def test_exponentials_waves_and_their_transposes(m, K, M, dtype, rng):  # noqa: F811
    b = Bench(dtype)
    x, P, d, A, dw = (rng.standard_normal(s) for s in ((m, K), (m, M), (m, M), (m, M), (m, 2 * M)))
    A = 40 * A
    X, E, D, total = b.put(x), b.put(P), b.put(d), b.buffer(m)
    numbers = b.put([0.3, 0.7])
    b.p.exponentials(E, X, b.n(m), b.n(M), b.n(K), numbers)
    b.p.exponentials_pull(D, E, b.n(m), b.n(M), numbers, total)
    F, dA, over, dX = b.buffer(m, 2 * M), b.buffer(m, M), b.buffer(m), b.put(x[::-1].copy())
    b.p.waves(b.put(A), b.n(m), b.n(M), b.put([0.25]), F)
    b.p.waves_pull(b.put(dw), F, b.n(m), b.n(M), dA)
    b.p.inverse_lengths(X, b.n(m), b.n(K), over)
    b.p.unit_pull(X, b.n(m), b.n(K), over, dX)
    b.run()
    phi = np.exp(P - 0.3 * np.sum(x**2, -1, keepdims=True) - 0.7)
    close(b.read(E, m, M), phi, dtype)
    close(b.read(D, m, M), d * phi, dtype)
    close(b.read(total, m), -0.6 * np.sum(d * phi, -1), dtype)
    A = A.astype(dtype).astype(np.float64)  # angles as they are rounded
    s, c = 0.25 * np.sin(A), 0.25 * np.cos(A)
    close(b.read(F, m, 2 * M), np.concatenate([s, c], -1), dtype, 4)
    close(b.read(dA, m, M), dw[:, :M] * c - dw[:, M:] * s, dtype)
    n = np.linalg.norm(x, axis=-1, keepdims=True)
    close(b.read(over, m), 1 / n[:, 0], dtype)
    y, dy = x / n, x[::-1]
    close(b.read(dX, m, K), (dy - y * np.sum(y * dy, -1, keepdims=True)) / n, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sine_and_cosine_of_large_angles_and_of_none(dtype):
    b, x = Bench(dtype), np.array([0.0, -0.0, 1e-30, np.pi / 4, np.pi / 2, np.pi, -3e3, 1e4, np.inf, np.nan])
    F = b.buffer(1, 20)
    b.p.waves(b.put(x[None]), b.n(1), b.n(10), b.put([1.0]), F)
    b.run()
    x = x.astype(dtype).astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected = np.concatenate([np.sin(x), np.cos(x)])
    found = b.read(F, 1, 20)[0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    close(np.nan_to_num(found), np.nan_to_num(expected), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "K"), [(1, 1), (5, 7), (32, 40)])
def test_averages_and_overlaps(m, K, dtype, rng):  # noqa: F811
    b = Bench(dtype)
    P, q, z, S, dS = (rng.uniform(0.1, 1, s) for s in ((m, m), (m, K), K, (K, m), (K, m)))
    q[0], P[0] = 0, 0  # nothing answers the first
    eps, sums, over, scaled, out = b.put([0.0]), b.buffer(m), b.buffer(m), b.buffer(m), b.buffer(m)
    b.p.averages(b.put(P), b.put(q), b.put(z), b.n(m), b.n(K), SCALE, eps, sums, over, scaled)
    b.p.column_overlap(b.put(S), b.put(dS), b.n(K), b.n(m), out)
    b.run()
    expected = 0.5 * q @ z + np.tril(P).sum(-1)
    close(b.read(sums, m), expected, dtype)
    expected[0] = np.inf
    close(b.read(over, m), 1 / expected, dtype)
    close(b.read(scaled, m), 0.5 / expected, dtype)
    close(b.read(out, m), np.sum(S * dS, 0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "V"), [(1, 1), (5, 7), (32, 40)])
def test_the_transpose_of_averages(m, V, dtype, rng):  # noqa: F811
    b = Bench(dtype)
    dout, out, sums = (rng.uniform(0.5, 1, s) for s in ((m, V), (m, V), m))
    sums[0], C, w = 0, b.buffer(m, V), b.buffer(m)  # nothing answers the first
    b.p.averages_pull(b.put(dout), b.put(out), b.put(sums), b.n(m), b.n(V), C, w)
    b.run()
    sums[0] = np.inf
    close(b.read(C, m, V), dout / sums[:, None], dtype)
    close(b.read(w, m), -np.sum(dout * out, axis=-1) / sums, dtype, 4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["rebased", "taylor", "favor+", "fourier"])
def test_gradients_through_a_named_map(name, normalize):
    """Of queries and keys as they were given: what is done to rows before their map has its transpose too."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 80, 2, 3))
    options = {"feature_map": name, "normalize": normalize, "eps": 0.1, "scale": 0.7}
    found = []
    for how in ({"backend": "reference"}, {"backend": "numba"}):
        out, pullback = la.vjp(la.linear_attention, q, k, v, **options, **how)
        grads = pullback(v)
        found.append([out, grads.q, grads.k, grads.v])
    assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) < 1e-10


def test_where_features_are_made():
    """Chunk by chunk in compiled loops, but not where the recurrent form was asked for."""
    x = np.ones((1, 40, 2, 3))
    compiled, apart = "features chunk by chunk", "features by array calls"
    for how, words in (({}, compiled), ({"chunk_size": 16}, compiled), ({"chunk_size": 1}, apart),
                       ({"backend": "chunks"}, apart)):  # fmt: skip
        assert words in la.explain(la.linear_attention, x, x, x, feature_map="taylor", **how).reason
