"""Adaptive filters: the textbook's loops, gradients, states handed over, ill-conditioned inputs, errors."""

from __future__ import annotations

import functools

import array_api_strict
import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error

K, V, T = 6, 2, 150
FILTERS = {"lms": (la.lms, {"mu": 0.05}), "nlms": (la.nlms, {"mu": 0.5, "eps": 0.1}),
           "rls": (la.rls, {"forgetting": 0.98, "delta": 0.3}),
           "affine_projection": (la.affine_projection, {"mu": 0.5, "eps": 0.1, "order": 3}),
           "window_least_squares": (la.window_least_squares, {"forgetting": 0.95, "delta": 0.2, "window": 9,
                                                              "bandwidth": 2.5})}  # fmt: skip
SPANS = {"affine_projection": {"order": 1}, "window_least_squares": {"window": 64}}
every_filter = pytest.mark.parametrize("name", FILTERS)
of_a_core = pytest.mark.parametrize("name", [name for name in FILTERS if name != "window_least_squares"])


def draw(T=T, lead=(), noise=0.1, dtype=np.float64, seed=0):
    """x, d: a random linear system, and noise."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((*lead, T, K)), rng.standard_normal((*lead, K, V))
    return x.astype(dtype), (x @ w + noise * rng.standard_normal((*lead, T, V))).astype(dtype)


def gain_of(name, K, mu=None, eps=None, forgetting=None, delta=None):
    """The textbook's gain vector of a token."""
    P = None if delta is None else np.eye(K) / delta

    def gain(u):
        nonlocal P
        if name == "lms":
            return mu * u
        if name == "nlms":
            return mu * u / (eps + u @ u)
        k = P @ u / (forgetting + u @ P @ u)
        P = (P - np.outer(k, u @ P)) / forgetting
        return k

    return gain


def projections(x, d, mu, eps, order):
    """(predictions, weights): each step from the last `order` rows, zeros before the first one."""
    W, y = np.zeros((x.shape[1], d.shape[1])), np.zeros_like(d)
    for t, u in enumerate(x):
        y[t], at = u @ W, slice(max(t - order + 1, 0), t + 1)
        rows = x[at]
        W = W + mu * rows.T @ np.linalg.solve(rows @ rows.T + eps * np.eye(len(rows)), d[at] - rows @ W)
    return y, W


def local_fits(x, d, forgetting, delta, window, bandwidth=None):
    """(predictions, weights): each token a least-squares problem of its own."""
    (T, n), y, W = x.shape, np.zeros_like(d), np.zeros((x.shape[1], d.shape[1]))
    for t in range(T + 1):
        at = np.arange(max(t - window, 0), t)
        near = 0.0 if bandwidth is None else ((x[min(t, T - 1)] - x[at]) ** 2).sum(-1) / (2 * bandwidth**2)
        root = np.sqrt(forgetting ** (t - 1 - at) * np.exp(-near))[:, None]
        rows = np.concatenate([root * x[at], np.sqrt(delta) * np.eye(n)])
        W = np.linalg.lstsq(rows, np.concatenate([root * d[at], np.zeros((n, d.shape[1]))]), rcond=None)[0]
        if t < T:
            y[t] = x[t] @ W
    return y, W


def textbook(name, x, d, **numbers):
    """(predictions, weights) of one signal, token by token."""
    if name in SPANS:
        return {"affine_projection": projections, "window_least_squares": local_fits}[name](x, d, **numbers)
    W, y, gain = np.zeros((x.shape[1], d.shape[1])), np.zeros_like(d), gain_of(name, x.shape[1], **numbers)
    for t, u in enumerate(x):
        y[t] = u @ W
        W = W + np.outer(gain(u), d[t] - y[t])
    return y, W


@every_filter
def test_it_is_the_textbooks(name):
    fn, numbers = FILTERS[name]
    x, d = draw(lead=(2,))
    found = fn(x, d, **numbers)
    for b in range(2):
        y, W = textbook(name, x[b], d[b], **numbers)
        assert relative_error(found.prediction[b], y) <= (1e-13 if name in SPANS else 4e-15)
        assert relative_error(found.weights[b], W) <= (1e-13 if name in SPANS else 4e-15)
    np.testing.assert_array_equal(found.error, d - found.prediction)
    np.testing.assert_array_equal(fn(x[1], d[1], **numbers).prediction, found.prediction[1])


@every_filter
def test_a_prediction_knows_nothing_of_its_own_target(name):
    fn, numbers = FILTERS[name]
    x, d = draw(lead=(2,))
    later = d.copy()
    later[:, 70:] += 1
    before, after = (fn(x, y, **numbers).prediction for y in (d, later))
    np.testing.assert_array_equal(before[:, :71], after[:, :71])
    assert not np.array_equal(before[:, 71:], after[:, 71:])


@every_filter
@pytest.mark.parametrize("cut", [0, 1, 80])
def test_a_signal_in_two_calls(name, cut):
    fn, numbers = FILTERS[name]
    x, d = draw()
    whole, first = fn(x, d, **numbers), fn(x[:cut], d[:cut], **numbers)
    second = fn(x[cut:], d[cut:], **numbers, state=first.state)
    parts = np.concatenate([first.prediction, second.prediction])
    assert relative_error(parts, whole.prediction) <= 1e-13
    assert relative_error(second.weights, whole.weights) <= 1e-13


def flat(x):
    return [z for y in x for z in (flat(y) if isinstance(y, tuple) else [y])]


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize(
    ("name", "has_queries"), [*((name, False) for name in FILTERS), ("window_least_squares", True)]
)
def test_gradients(name, has_queries, has_state):
    """Central differences along one direction per input: predictions, errors, weights and state all have cotangents."""
    (fn, numbers), rng = FILTERS[name], np.random.default_rng(1)
    x, d = draw(20, lead=(2,))
    rate = {"mu" if "mu" in numbers else "forgetting": rng.uniform(0.2, 0.9, (2, 20)) * (0.2 if name == "lms" else 1)}
    given: dict = {"x": x, "d": d, **rate}
    options = {n: y for n, y in numbers.items() if n not in rate}
    if has_queries:
        given["q"] = rng.standard_normal(x.shape)
    if has_state:
        given["state"] = fn(*draw(9, lead=(2,), seed=2), **numbers).state
    result, pullback = la.vjp(fn, **given, **options)
    cotangents = [rng.standard_normal(y.shape) for y in flat(result)]
    grads = pullback(
        *cotangents[:3], type(result.state)(*cotangents[3:]) if isinstance(result.state, tuple) else cotangents[3]
    )

    def value(inputs):
        return sum((a * b).sum() for a, b in zip(flat(fn(**inputs, **options)), cotangents, strict=True))

    for n, y in given.items():
        steps = [rng.standard_normal(p.shape) for p in flat((y,))]
        if n == "state" and name == "rls":
            steps[1] += steps[1].swapaxes(-1, -2)  # Z is symmetric
        moved = [[p + sign * 1e-6 * s for p, s in zip(flat((y,)), steps, strict=True)] for sign in (1, -1)]
        moved = [type(y)(*m) if isinstance(y, tuple) else m[0] for m in moved]
        numeric = (value(given | {n: moved[0]}) - value(given | {n: moved[1]})) / 2e-6
        exact = sum((g * s).sum() for g, s in zip(flat((getattr(grads, n),)), steps, strict=True))
        assert abs(numeric - exact) <= 1e-6 * max(1, abs(exact)), n
    assert has_state or grads.state is None


def test_a_window_without_a_kernel_is_least_squares_of_its_rows():
    x, d = draw(40)
    for window in (1, 5, 60):
        found = la.window_least_squares(x, d, 0.9, window=window, delta=1e-3)
        y, W = local_fits(x, d, 0.9, 1e-3, window)
        assert relative_error(found.prediction, y) <= 1e-11
        assert relative_error(found.weights, W) <= 1e-11
    assert la.explain(la.window_least_squares, x, d).operations > 0


def attended(q, x, d, forgetting, delta, window, bandwidth=None):
    """Outputs of queries: each a least-squares problem of its own, its token included."""
    out = np.zeros_like(d)
    for t in range(len(x)):
        at = np.arange(max(t - window + 1, 0), t + 1)
        near = 0.0 if bandwidth is None else ((q[t] - x[at]) ** 2).sum(-1) / (2 * bandwidth**2)
        w = (forgetting ** (t - at) * np.exp(-near))[:, None]
        out[t] = q[t] @ np.linalg.solve(x[at].T @ (w * x[at]) + delta * np.eye(x.shape[1]), x[at].T @ (w * d[at]))
    return out


@pytest.mark.parametrize("bandwidth", [None, 1.5])
@pytest.mark.parametrize("window", [1, 5, 60])
def test_queries_read_the_fit_of_their_window(window, bandwidth):
    (x, d), q = draw(40, lead=(2,)), draw(40, lead=(2,), seed=3)[0]
    numbers = {"window": window, "delta": 0.2, "bandwidth": bandwidth}
    found = la.window_least_squares(x, d, 0.9, q=q, **numbers)
    for b in range(2):
        assert relative_error(found.prediction[b], attended(q[b], x[b], d[b], 0.9, **numbers)) <= 1e-12
    np.testing.assert_array_equal(found.error, d - found.prediction)
    assert relative_error(np.matmul(q[:, -1:], found.weights)[:, 0], found.prediction[:, -1]) <= 1e-12
    first = la.window_least_squares(x[:, :13], d[:, :13], 0.9, q=q[:, :13], **numbers)
    second = la.window_least_squares(x[:, 13:], d[:, 13:], 0.9, q=q[:, 13:], state=first.state, **numbers)
    halves = np.concatenate([first.prediction, second.prediction], axis=1)
    assert relative_error(halves, found.prediction) <= 1e-13
    one = la.step(la.window_least_squares, x[:, 13], d[:, 13], 0.9, q=q[:, 13], state=first.state, **numbers)
    assert relative_error(one.prediction, found.prediction[:, 13]) <= 1e-13
    none = la.window_least_squares(x[:, :0], d[:, :0], 0.9, q=q[:, :0], state=first.state, **numbers)
    assert none.prediction.shape == (2, 0, 2)


def test_queries_over_all_tokens_are_mesa_net():
    """With a ridge that does not fade."""
    (x, d), q = draw(50), draw(50, seed=3)[0]
    lam, ridge = np.full((50, 1), 0.97), np.full((1, K), 0.3)
    q, x, d = q[:, None], x[:, None], d[:, None]
    expected = la.mesa_net(q, x, d, np.log(lam), np.ones_like(lam), ridge, scale=1.0)
    found = la.window_least_squares(x[:, 0], d[:, 0], lam[:, 0], q=q[:, 0], window=64, delta=0.3)
    assert relative_error(found.prediction, expected[:, 0]) <= 1e-12


def test_queries_of_a_large_ridge_are_linear_attention_in_a_window():
    """(X^T w X + r I)^{-1} tends to I / r: each query sums its window's values by its products with their keys."""
    (x, d), q = draw(30), draw(30, seed=3)[0]
    band = np.subtract.outer(np.arange(30), np.arange(30))
    scores = np.where((band >= 0) & (band < 7), q @ x.T, 0)
    found = 1e9 * la.window_least_squares(x, d, q=q, window=7, delta=1e9).prediction
    assert relative_error(found, scores @ d) <= 1e-7


def test_no_later_token_and_no_other_query_changes_a_query():
    (x, d), q = draw(30), draw(30, seed=3)[0]
    other = [np.concatenate([y[:20], y[20:] + 1]) for y in (x, d, q)]
    before, after = (
        la.window_least_squares(x, d, q=q, window=7, bandwidth=1.0).prediction for x, d, q in ((x, d, q), other)
    )
    np.testing.assert_array_equal(before[:20], after[:20])
    moved = la.window_least_squares(x, np.concatenate([d[:20], d[20:21] + 1, d[21:]]), q=q, window=7).prediction
    plain = la.window_least_squares(x, d, q=q, window=7).prediction
    assert not np.array_equal(moved[20], plain[20])  # the value of its own token
    only = la.window_least_squares(x, d, q=np.concatenate([q[:5] + 1, q[5:]]), window=7).prediction
    np.testing.assert_array_equal(only[5:], plain[5:])


def test_a_window_of_all_tokens_is_rls():
    """With a ridge that does not matter: that of rls fades."""
    x, d = draw(60)
    whole = la.window_least_squares(x, d, 0.97, window=100, delta=1e-9).prediction
    assert relative_error(whole[20:], la.rls(x, d, 0.97, delta=1e-9).prediction[20:]) <= 1e-7


def test_what_has_left_a_window_leaves_nothing():
    """A burst of 1e8: a sum from which it is subtracted keeps its rounding error."""
    x, d = draw(60, dtype=np.float32)
    loud_x, loud_d = x.copy(), d.copy()
    loud_x[5:9], loud_d[5:9] = 1e8 * x[5:9], 1e8 * d[5:9]
    quiet, loud = (la.window_least_squares(*y, window=12, delta=1e-3) for y in ((x, d), (loud_x, loud_d)))
    np.testing.assert_array_equal(quiet.prediction[21:], loud.prediction[21:])


def test_windows_in_parts_are_the_whole(monkeypatch):
    fn = la.window_least_squares
    x, d = draw(50, lead=(2,))
    whole, pullback = la.vjp(fn, x, d, np.full((2, 50), 0.9), window=9)
    expected = pullback(d, d, whole.weights)
    monkeypatch.setattr("linattn_np.filters.local_fits.MOST", 9 * 16 * 7)
    parts, pullback = la.vjp(fn, x, d, np.full((2, 50), 0.9), window=9)
    np.testing.assert_array_equal(parts.prediction, whole.prediction)
    for a, b in zip(flat(pullback(d, d, whole.weights)), flat(expected), strict=True):
        assert (a is None and b is None) or relative_error(a, b) <= 1e-13


def test_one_row_of_affine_projection_is_nlms():
    x, d = draw(40)
    found = la.affine_projection(x, d, 0.7, order=1, eps=0.2)
    assert relative_error(found.prediction, la.nlms(x, d, 0.7, eps=0.2).prediction) <= 1e-14


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_full_step_fits_the_last_tokens(dtype):
    x, d = draw(40, dtype=dtype)
    found = la.affine_projection(x, d, order=4)
    assert relative_error(x[-4:] @ found.weights, d[-4:]) <= (1e-3 if dtype is np.float32 else 1e-11)


def test_rows_that_depend_on_each_other_are_not_divided_by_zero():
    """Silence, a row again, more rows than channels: the ridge is the rounding error."""
    x, d = draw(30)
    x[3:9] = 0
    x[15], d[15] = x[14], d[14]
    found, pullback = la.vjp(la.affine_projection, x, d, 0.9, order=8)
    assert all(np.isfinite(y).all() for y in (*flat(found), *(y for y in flat(pullback(d)) if y is not None)))
    np.testing.assert_allclose(la.affine_projection(0 * x, 0 * d).weights, 0, rtol=0, atol=0)


def test_the_rate_as_a_number_has_no_gradient():
    x, d = draw(20)
    assert la.vjp(la.lms, x, d, 0.1)[1](d).mu is None
    assert relative_error(la.lms(x, d, np.full(20, 0.1)).weights, la.lms(x, d, 0.1).weights) == 0


def test_silence_teaches_nothing():
    """Without eps: rows of zeros have no step."""
    x, d = draw(30)
    x[10:20] = 0
    out, pullback = la.vjp(la.nlms, x, d, 0.5)
    dx = pullback(d).x
    assert np.isfinite(out.prediction).all() and np.isfinite(dx).all()  # noqa: PT018
    kept = np.delete(np.arange(30), slice(10, 20))
    assert relative_error(la.nlms(x[kept], d[kept], 0.5).weights, out.weights) <= 1e-14


@pytest.mark.parametrize("forgetting", [0.95, 0.99])
def test_poor_excitation(forgetting):
    """Two sines excite four of eight directions: the textbook's P grows until predictions burst."""
    n, rng = np.arange(6000), np.random.default_rng(0)
    x = la.delay_line(np.sin(0.3 * n) + 0.5 * np.sin(0.05 * n), 8)
    d = x @ rng.standard_normal((8, 1)) + 1e-3 * rng.standard_normal((6000, 1))
    with np.errstate(all="ignore"):
        theirs = np.abs(d - textbook("rls", x, d, forgetting=forgetting, delta=1.0)[0])[1000:]
    found = la.rls(x, d, forgetting)
    assert not theirs.max() < 10
    assert np.abs(found.error[1000:]).max() < 0.01
    assert np.abs(la.rls(*(y.astype(np.float32) for y in (x, d)), forgetting).error[1000:]).max() < 0.02


def test_a_signal_that_stops_and_comes_back():
    rng = np.random.default_rng(0)
    u = np.concatenate([rng.standard_normal(100), np.zeros(8000), rng.standard_normal(100)])
    x, w = la.delay_line(u, 4), rng.standard_normal((4, 1))
    found = la.rls(x, x @ w, 0.9)
    assert np.isfinite(found.prediction).all()
    assert relative_error(found.weights, w) <= 1e-10


@every_filter
def test_other_dtypes_and_libraries(name):
    fn, numbers = FILTERS[name]
    x, d = draw(40, dtype=np.float32)
    wide = fn(x.astype(np.float64), d.astype(np.float64), **numbers)
    found = fn(x, d, **numbers)
    assert found.prediction.dtype == found.weights.dtype == np.float32
    assert relative_error(found.prediction, wide.prediction) <= 2e-5
    theirs = fn(*(array_api_strict.asarray(y) for y in (x, d)), **numbers)
    assert type(theirs.prediction) is type(array_api_strict.asarray(x))
    assert relative_error(np.asarray(theirs.prediction), wide.prediction) <= 2e-5


def test_delay_line():
    u = np.arange(1.0, 6)
    np.testing.assert_array_equal(la.delay_line(u, 3)[:3], [[1, 0, 0], [2, 1, 0], [3, 2, 1]])
    np.testing.assert_array_equal(la.delay_line(u[2:], 3, before=u[:2]), la.delay_line(u, 3)[2:])
    assert la.delay_line(np.ones((2, 4)), 1).shape == (2, 4, 1)


X, D = draw(5)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: la.lms(X, D, None), TypeError, "lms: mu is missing, expected the arrays x, d, mu"),
        (lambda: la.lms(X, D, -1.0), ValueError, "lms: mu is -1.0, expected a finite number >= 0"),
        (lambda: la.lms(X, D[:3], 1.0), ValueError, r"lms: x has shape \(5, 6\) and d \(3, 2\), expected"),
        (lambda: la.lms(X, D, D), ValueError, r"lms: mu has shape \(5, 2\), expected \(5,\)"),
        (lambda: la.lms(X, D, 1.0, state=X), ValueError, r"lms: state has shape \(5, 6\), expected \(6, 2\)"),
        (lambda: la.lms(X, D, 1.0, eps=1), TypeError, "lms: unknown option 'eps', expected one of x, d, mu, state"),
        (lambda: la.lms(X.astype(int), D, 1.0), TypeError, "lms: x has dtype int64"),
        (lambda: la.nlms(X, D, eps=-1), ValueError, "nlms: eps is -1, expected a finite number >= 0"),
        (lambda: la.rls(X, D, 1.5), ValueError, r"rls: forgetting is 1.5, expected a number in \(0, 1\]"),
        (lambda: la.rls(X, D, delta=0), ValueError, "rls: delta is 0, expected a finite number > 0"),
        (lambda: la.rls(X, D, state=X), TypeError, r"rls: state is a ndarray, expected \(S, Z, ridge\) as an RLSState"),
        (lambda: la.vjp(la.lms, X, D, 1.0)[1](), TypeError, "lms: the pullback got no cotangent"),
        (
            lambda: la.vjp(la.lms, X, D, 1.0)[1](X),
            ValueError,
            r"lms: dprediction has shape \(5, 6\), expected \(5, 2\)",
        ),
        (
            lambda: la.lms(X, D, np.array([0.1, 0.1, -1, 0.1, 0.1])),
            ValueError,
            r"lms: mu is -1 at \(2,\), expected finite numbers >= 0",
        ),
        (
            lambda: la.lms(X, D[:, 0], 1.0),
            ValueError,
            r"lms: x .* and d \(5,\), .*: d\[:, None\] is one desired output$",
        ),
        (lambda: la.lms(X[None], D[None, :, 0], 1.0), ValueError, r"lms: .*: d\[\.\.\., None\] is one desired output$"),
        (
            lambda: la.lms(X[:, 0], D, 1.0),
            ValueError,
            r"lms: .*: x\[:, None\] is \(T, 1\), la.delay_line\(x, taps\) is",
        ),
        (lambda: la.lms(X, D[:3], 1.0), ValueError, r"lms: .*\(\.\.\., T, V\)$"),
        (
            lambda: la.step(la.lms, X[0], D[0, 0], 1.0),
            ValueError,
            r"lms: x has shape \(6,\) and d \(\), expected \(\.\.\., K\) and \(\.\.\., V\): d\[\.\.\., None\]",
        ),
        (lambda: la.step(la.lms, X[0], D[0], np.ones(5)), ValueError, r"lms: mu has shape \(5,\), expected \(\)"),
        (
            lambda: la.step(la.lms, X[0], D[0], 1.0, chunk_size=1),
            TypeError,
            "step: chunk_size was given, expected none",
        ),
        (
            lambda: la.lms(X.astype("f"), D.astype("f"), 1e300),
            ValueError,
            r"lms: mu is 1e\+300, expected a number that",
        ),
        (
            lambda: la.rls(X.astype("f"), D.astype("f"), 1e-60),
            ValueError,
            "rls: forgetting is 1e-60, expected a number",
        ),
        (lambda: la.affine_projection(X, D, order=0), ValueError, "affine_projection: order is 0, expected a whole"),
        (
            lambda: la.affine_projection(X, D, state=(X, X, D)),
            ValueError,
            r"affine_projection: state.W has shape \(5, 6\), expected \(6, 2\)",
        ),
        (
            lambda: la.window_least_squares(X, D, window=2.5),
            ValueError,
            "window_least_squares: window is 2.5, expected a whole number from 1",
        ),
        (lambda: la.lms(X, D, 1.0, q=X), TypeError, "lms: unknown option 'q', expected one of x, d, mu, state"),
        (
            lambda: la.window_least_squares(X, D, q=D),
            ValueError,
            r"window_least_squares: q has shape \(5, 2\), expected \(5, 6\)",
        ),
        (
            lambda: la.window_least_squares(X, D, bandwidth=0),
            ValueError,
            "window_least_squares: bandwidth is 0, expected a finite number > 0",
        ),
        (
            lambda: la.window_least_squares(X, D, state=X),
            TypeError,
            r"window_least_squares: state is a ndarray, expected \(x, d, rate\) as a PastState",
        ),
        (lambda: la.delay_line(X, 0), ValueError, "delay_line: taps is 0, expected a whole number from 1"),
        (
            lambda: la.delay_line(X, 3, before=X),
            ValueError,
            r"delay_line: before has shape \(5, 6\), expected \(5, 2\)",
        ),
        (lambda: la.delay_line(X[0, 0], 3), ValueError, r"delay_line: u has shape \(\), expected \(..., T\)"),
        (lambda: la.delay_line(X.astype(int), 3), TypeError, "delay_line: u has dtype int64, expected one of"),
        (
            lambda: la.delay_line(X, 3, before=X[:, :2] * 1j),
            TypeError,
            "delay_line: before has dtype complex128, expected one of",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=f"^{text}"):
        call()


@pytest.mark.parametrize(("dtype", "scale"), [
    (np.float32, 2.0**-60), (np.float32, 2.0**-70), (np.float32, 2.0**-120), (np.float32, 2.0**65),
    (np.float32, 2.0**100), (np.float64, 2.0**-500), (np.float64, 2.0**-530), (np.float64, 2.0**520)])  # fmt: skip
def test_nlms_has_no_scale(dtype, scale):
    """Squares of quiet and loud inputs are no numbers; a power of 2 changes no bit, of gradients too."""
    rng = np.random.default_rng(1)
    x, d, dy = (rng.standard_normal((50, n)).astype(dtype) for n in (4, 1, 1))
    x[7] = 0
    (right, _, W, _), back = la.vjp(la.nlms, x, d, mu=0.5)
    (found, _, scaled, _), pullback = la.vjp(la.nlms, x * dtype(scale), d, mu=0.5)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 if dtype is np.float32 else 1e-14)
    np.testing.assert_allclose(scaled * dtype(scale), W, rtol=0, atol=1e-5 if dtype is np.float32 else 1e-14)
    grads, expected = pullback(dy), back(dy)
    error = abs(grads.d - expected.d).max() / abs(expected.d).max()
    assert error < (1e-5 if dtype is np.float32 else 1e-13)
    assert np.isfinite(grads.x).all()
    error = abs(grads.x * dtype(scale) - expected.x)[x[:, 0] != 0].max() / abs(expected.x).max()
    assert error < (1e-4 if dtype is np.float32 else 1e-12)


@every_filter
@pytest.mark.parametrize(("T", "K"), [(0, 3), (4, 0), (0, 0)])
def test_signals_without_numbers(name, T, K):
    """The prediction from no channels is 0."""
    fn, numbers = FILTERS[name]
    found, pullback = la.vjp(fn, np.ones((T, K)), np.ones((T, 2)), **numbers)
    np.testing.assert_array_equal(found.prediction, np.zeros((T, 2)))
    assert pullback(found.prediction).x.shape == (T, K)


@every_filter
@pytest.mark.parametrize("dtype", [int, complex, object, "M8[s]"], ids=str)
def test_cotangents_have_numbers(name, dtype):
    """A complex cotangent would lose its imaginary part."""
    fn, numbers = FILTERS[name]
    found, pullback = la.vjp(fn, X, D, **numbers)
    for n, part in enumerate(("dprediction", "derror", "dweights")):
        given = [None] * n + [np.zeros(found[n].shape, dtype)]
        with pytest.raises(TypeError, match=rf"^{name}: {part} has dtype .*, expected one of float16"):
            pullback(*given)


RATES = {name: next(n for n in ("mu", "forgetting") if n in numbers) for name, (_, numbers) in FILTERS.items()}


@every_filter
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.1, 0.0, 1.5])
def test_rates_in_arrays_are_checked_as_numbers_are(name, value):
    """One wrong value in a row; the value as a number."""
    fn, (x, d) = FILTERS[name][0], draw(5, lead=(2,))
    row = np.full((2, 5), 0.5)
    row[1, 3] = value
    if RATES[name] == "mu" and 0 <= value < np.inf:
        assert np.isfinite(fn(x, d, row).error).all()
        return
    with pytest.raises(ValueError, match=f"^{name}: {RATES[name]} is"):
        fn(x, d, float(value))
    text = f"^{name}: {RATES[name]} is {value:.4g} at "
    for call in (fn, *(functools.partial(of, fn) for of in (la.vjp, la.check, la.explain))):
        with pytest.raises(ValueError, match=text + r"\(1, 3\), expected"):
            call(x, d, row)
    with pytest.raises(ValueError, match=text + r"\(1,\), expected"):
        la.step(fn, x[:, 3], d[:, 3], row[:, 3])


@every_filter
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("is_array", [False, True])
def test_steps_are_the_whole(name, lead, is_array):
    fn, numbers = FILTERS[name]
    x, d = draw(9, lead=lead)
    rates = {RATES[name]: np.full((*lead, 9), numbers[RATES[name]])} if is_array else {}
    whole, state = fn(x, d, **numbers | rates), None
    for t in range(9):
        one = {n: np.asarray(y[..., t]) for n, y in rates.items()}
        found = la.step(fn, x[..., t, :], d[..., t, :], **numbers | one, state=state)
        state = found.state
        assert found.prediction.shape == found.error.shape == (*lead, 2)
        np.testing.assert_allclose(found.prediction, whole.prediction[..., t, :], rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.error, whole.error[..., t, :], rtol=0, atol=1e-13)
    assert relative_error(found.weights, whole.weights) <= 1e-13


@every_filter
def test_gradients_of_a_step_are_those_of_one_token(name):
    fn, numbers = FILTERS[name]
    x, d = draw(9, lead=(2,))
    state = fn(x[:, :8], d[:, :8], **numbers).state
    given = {**numbers, "state": state}
    rate = np.full((2, 1), given.pop(RATES[name]))
    _, right = la.vjp(fn, x[:, 8:], d[:, 8:], rate, **given)
    found, pullback = la.vjp(la.step, fn, x[:, 8], d[:, 8], rate[:, 0], **given)
    dy, de, dW = np.random.default_rng(5).standard_normal((2, 2, 2)), *(y + 1 for y in (found.error, found.weights))
    expected, grads = right(dy[0][:, None], de[:, None], dW), pullback(dy[0], de, dW)
    for a, b in zip(flat(grads), flat(expected), strict=True):
        assert (a is None and b is None) or np.array_equal(a, b.reshape(a.shape))
    assert [y.shape for y in (grads.x, grads.d, grads[2])] == [(2, K), (2, V), (2,)]
    with pytest.raises(ValueError, match=rf"^{name}: dprediction has shape \(2, 1, 2\), expected \(2, 2\)"):
        pullback(dy[0][:, None])


@of_a_core
@pytest.mark.parametrize("chunk_size", [1, 16])
def test_explain_says_how_the_core_computes_it(name, chunk_size):
    fn, numbers = FILTERS[name]
    found = la.explain(fn, *draw(40), **numbers, chunk_size=chunk_size)
    assert found.function == name
    assert found.compute_dtype == "float64"
    assert found.form == ("recurrent form" if chunk_size == 1 else "chunk form")
    reference = la.explain(fn, *draw(40), **numbers, backend="reference")
    assert reference.backend == "reference"
    assert reference.operations > 0


@every_filter
def test_check_has_nothing_to_say_of_a_sound_call(name):
    fn, numbers = FILTERS[name]
    x, d = draw()
    assert la.check(fn, x, d, **numbers) == []
    assert la.check(fn, x, d, **numbers, state=fn(x, d, **numbers).state) == []
    assert la.check(fn, x[:0], d[:0], **numbers) == []


def found_by(name, x, d, **more):
    """(array, is_error) of each finding."""
    fn, numbers = FILTERS[name]
    return [(f.array, f.is_error) for f in la.check(fn, x, d, **numbers | more)]


@every_filter
def test_check_finds_what_signals_and_states_say(name):
    x, d = draw(50)
    for which in ("x", "d"):
        signals = {"x": x.copy(), "d": d.copy()}
        signals[which][7, 1] = np.nan
        assert found_by(name, **signals) == [(which, True)]
        (finding,) = la.check(FILTERS[name][0], *signals.values(), **FILTERS[name][1])
        assert str(finding) == f"{which} is NaN or inf at 1 of {signals[which].size} places, first at (7, 1)"
    state = FILTERS[name][0](x, d, **FILTERS[name][1]).state
    bad = type(state)(*(y * np.inf for y in state)) if isinstance(state, tuple) else state * np.inf
    assert {n.split(".")[0] for n, _ in found_by(name, x, d, state=bad)} == {"state"}
    assert found_by(name, x, d, state=bad)
    assert found_by(name, x[:4], d[:4]) == [("x", False)]


def test_check_finds_what_rates_say():
    x, d = draw(50)
    assert found_by("lms", x, d, mu=0.0) == found_by("nlms", x, d, mu=0.0) == [("mu", False)]
    assert found_by("nlms", x, d, mu=2.5, eps=0.0) == [("mu", True)]
    loud = np.where(np.arange(50)[:, None] == 9, 100 * x, x)
    assert found_by("lms", loud, d) == [("mu", False)]
    (finding,) = la.check(la.lms, loud, d, 0.05)
    value = 0.05 * (loud[9] ** 2).sum()
    assert finding.message == (
        f"times |x|^2 is {value:.4g} at (9,), expected 0 to 2: the step multiplies the weights "
        f"by {1 - value:.4g} along x; la.nlms divides by |x|^2"
    )
    assert found_by("lms", x, d, mu=100.0) == [("mu", True)]
    assert found_by("rls", x, d, forgetting=0.8) == [("forgetting", False)]


@every_filter
def test_arrays_without_numbers_are_not_looked_at(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    (fn, numbers), (x, d) = FILTERS[name], draw(5, dtype=np.float32)
    fn, rate = functools.partial(fn, **{n: y for n, y in numbers.items() if n != RATES[name]}), np.full(5, 0.5, "f")
    np.testing.assert_allclose(jax.jit(fn)(x, d, rate).error, fn(x, d, rate).error, rtol=0, atol=1e-5)
