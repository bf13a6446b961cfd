"""Identities of softmax attention: masks, scales, biases, parts that are merged, counted operations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import linattn_np as la
from tests.cases import GROWING

T, K, V = 12, 5, 3
BACKENDS = ("reference", "chunks", "numba")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def one():
    """q, k, v, g of one head."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, T, 1, K))
    return q, k, rng.standard_normal((T, 1, V)), -rng.uniform(0.05, 0.7, (T, 1))


def assert_close(found, expected, bound=1e-12):
    assert la.testing.relative_error(found, expected) <= bound


def logs_of(q, k, **options):
    """log of the sums, from the numerator for values of 1."""
    return np.log(la.softmax_attention(q, k, np.ones((len(k), 1, 1)), normalize=False, **options))


@every_backend
def test_a_mask_is_added(one, backend):
    """The first row is v_1; changing token j changes no bit of earlier rows."""
    q, k, v, _ = one
    out = la.softmax_attention(q, k, v, backend=backend)
    np.testing.assert_array_equal(out[0], v[0])
    for j in (1, 7, T - 1):
        changed = [x.copy() for x in (k, v)]
        for x in changed:
            x[j] = 1e3
        np.testing.assert_array_equal(la.softmax_attention(q, *changed, backend=backend)[:j], out[:j])


@every_backend
def test_a_scale_is_a_factor_of_q_and_the_denominator_a_numerator(one, backend):
    q, k, v, g = one
    for fn, more in ((la.softmax_attention, ()), (la.forgetting_attention, (g,))):
        out = fn(q, k, v, *more, scale=0.6, backend=backend)
        assert_close(fn(0.6 * q, k, v, *more, scale=1, backend=backend), out)
        num, den = (fn(q, k, x, *more, scale=0.6, normalize=False, backend=backend) for x in (v, np.ones_like(v)))
        assert_close(num / den, out)


@every_backend
def test_biases(one, backend):
    """A constant gate is ALiBi; slope j alone is the same; no gate is softmax attention; gates are factors of e^z."""
    q, k, v, g = one
    slope = np.array([0.3])
    alibi = la.alibi(q, k, v, slope, backend=backend)
    np.testing.assert_array_equal(la.forgetting_attention(q, k, v, np.full_like(g, -0.3), backend=backend), alibi)
    columns = np.concatenate([k, np.arange(T)[:, None, None]], axis=-1)  # a further channel: scale 1 there
    rows = np.concatenate([q * K**-0.5, np.full((T, 1, 1), 0.3)], axis=-1)
    assert_close(la.softmax_attention(rows, columns, v, scale=1, backend=backend), alibi)
    assert_close(la.forgetting_attention(q, k, v, 0 * g, backend=backend), la.softmax_attention(q, k, v))
    plain = la.influence_matrix(la.softmax_attention, q, k, v, normalize=False)[0]
    b = np.cumsum(g[:, 0])
    gated = plain * np.exp(np.minimum(b[:, None] - b, 0))
    found = la.influence_matrix(la.forgetting_attention, q, k, v, g, backend=backend)[0]
    assert_close(found, gated / gated.sum(axis=1, keepdims=True))


@every_backend
def test_parts_merge_by_the_logs_of_their_sums(one, backend):
    """o = e^{L1 - L} o1 + e^{L2 - L} o2, L = log(e^L1 + e^L2), any number of keys in each, none too."""
    q, k, v, _ = one
    options = {"causal": False, "backend": backend}
    out, L = la.softmax_attention(q, k, v, **options), logs_of(q, k, **options)
    for n in (1, 5, T - 1):
        parts = [(la.softmax_attention(q, k[s], v[s], **options), logs_of(q, k[s], **options))
                 for s in (slice(n), slice(n, None))]  # fmt: skip
        assert_close(np.logaddexp(parts[0][1], parts[1][1]), L)
        assert_close(sum(np.exp(own - L) * o for o, own in parts), out)


@every_backend
def test_tiles_of_fewer_queries_that_a_mask_hides_wholly(backend):
    """The last 5 of 17 tokens as queries, in tiles of 4: rows of the full square, a tile without a pair too."""
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((17, 1, K)), rng.standard_normal((17, 1, K)), rng.standard_normal((17, 1, V))
    size = {} if backend == "reference" else {"chunk_size": 4}
    whole = la.softmax_attention(q, k, v)
    assert_close(la.softmax_attention(q[-5:], k, v, backend=backend, **size), whole[-5:])
    for a, b in itertools.pairwise([0, 4, 9, 17]):
        _, state = la.softmax_attention(None, k[:a], v[:a], return_state=True)
        part = la.softmax_attention(q[a:b], k[a:b], v[a:b], state=state, backend=backend, **size)
        assert_close(part, whole[a:b])


@pytest.mark.parametrize(
    ("queries", "keys", "d", "operations"),
    [(1024, 1024, 64, 268_435_456), (128, 4096, 128, 268_435_456), (64, 64, 64, 1_048_576), (1, 512, 64, 131_072)],
)
def test_operations(queries, keys, d, operations):
    """4 Lq Lk d, against 2 (Lq + Lk) d^2 of linear attention; the same at d = 2 Lq Lk / (Lq + Lk)."""
    q, k, v = (np.broadcast_to(np.float32(0), (n, 1, d)) for n in (queries, keys, keys))
    found = la.explain(la.softmax_attention, q, k, v, causal=False).operations
    assert found == operations == 4 * queries * keys * d
    linear = 2 * (queries + keys) * d * d
    assert (found > linear) == (d < 2 * queries * keys / (queries + keys))


@every_backend
@pytest.mark.parametrize("fn", GROWING, ids=lambda fn: fn.__name__)
def test_no_heads_have_outputs_and_gradients_without_numbers(fn, backend):
    x = la.testing.sample(fn, np.random.default_rng(2), B=(2,), T=T, H=0, K=K, V=V)
    out, pullback = la.vjp(fn, **x, backend=backend)
    grads = pullback(np.ones_like(out))
    assert out.shape == (2, T, 0, V)
    assert {n: getattr(grads, n).shape for n in x} == {n: y.shape for n, y in x.items()}


@pytest.mark.parametrize("fn", [la.softmax_attention, la.path_attention], ids=lambda fn: fn.__name__)
def test_numpy_arrays_say_why_no_cuda_kernel_takes_them(fn):
    q = np.ones((3, 2, 4), np.float32)
    arrays = [q] * 3 if fn is la.softmax_attention else [q, q, q, q, q[..., 0]]
    assert la.explain(fn, *arrays).others["cuda"] == "the arrays are not CuPy arrays"
    with pytest.raises(ValueError, match="does not cover this call: the arrays are not CuPy"):
        fn(*arrays, backend="cuda")
