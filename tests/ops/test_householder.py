"""Products of Householder-like maps against products of matrices."""

import numpy as np
import pytest

from linattn_np.ops import householder as maps

C, K = 7, 4


@pytest.fixture
def D():
    rng = np.random.default_rng(0)
    w, q, k = rng.standard_normal((3, 2, C, K)) / 2
    return w, rng.uniform(0, 2, (2, C, 1)), q, k


def matrices(w, beta):
    return np.eye(K) - beta[..., None] * w[..., :, None] * w[..., None, :]


def test_blocks_are_products_of_matrices(D):
    w, beta, q, k = D
    f, H = maps.factorised(np, w, beta), matrices(w, beta)
    R = np.stack([np.linalg.multi_dot(list(each[::-1])) for each in H])
    np.testing.assert_allclose(maps.product(np, f), R, atol=1e-13)
    start, end = maps.to_start(np, f, q)[0], maps.to_end(np, f, k)[0]
    for n in range(2):
        for t in range(C):
            x, y = q[n, t], k[n, t]
            for s in range(t, -1, -1):
                x = x @ H[n, s]
            for s in range(t + 1, C):
                y = y @ H[n, s]
            np.testing.assert_allclose(start[n, t], x, atol=1e-13)
            np.testing.assert_allclose(end[n, t], y, atol=1e-13)
    one = maps.one_map(np, q, w[:, :1], beta[:, :1])
    np.testing.assert_allclose(one, q @ H[:, 0], atol=1e-13)


def test_gradients_by_central_differences(D):
    rng = np.random.default_rng(1)
    given = dict(zip(("w", "beta", "q", "k"), D, strict=True))

    def results(w, beta, q, k):
        f = maps.factorised(np, w, beta)
        return maps.product(np, f), *maps.to_start(np, f, q), *maps.to_end(np, f, k)

    f = maps.factorised(np, *D[:2])
    d = [rng.standard_normal(y.shape) for y in results(**given)]
    sums = maps.HouseholderGradients(np, f)
    maps.product_vjp(f, sums, d[0])
    dq = maps.to_start_vjp(f, sums, (given["q"], maps.to_start(np, f, given["q"])[1]), *d[1:3])
    dk = maps.to_end_vjp(f, sums, (given["k"], maps.to_end(np, f, given["k"])[1]), *d[3:])
    dw, dbeta = maps.factorised_vjp(f, sums)
    for name, grad in zip(given, (dw, dbeta, dq, dk), strict=True):
        step = 1e-6 * rng.standard_normal(grad.shape)
        up, down = (results(**given | {name: given[name] + sign * step}) for sign in (1, -1))
        numeric = sum(np.sum((a - b) / 2 * y) for a, b, y in zip(up, down, d, strict=True))
        assert abs(numeric - np.sum(grad * step)) <= 1e-7 * 1e-6 * np.abs(grad).sum(), name


@pytest.mark.parametrize("T", [1, 6, 7, 8, 21])
def test_tokens_as_blocks(T):
    x = np.random.default_rng(0).standard_normal((2, T, K))
    y = maps.blocks(np, x, C)
    assert y.shape == (2, -(-T // C), C, K)
    np.testing.assert_array_equal(maps.tokens(np, y, T), x)
