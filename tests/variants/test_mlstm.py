"""mlstm: the equation without a gauge, the gauge, the normaliser's gradient, exponential gates in float32."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import check_vjp, relative_error
from tests.cases import parts

T, H, K, V = 23, 2, 5, 3
STEP = 1e-30


def drawn(seed=0, T=T, B=(2,), **options):
    x = la.testing.sample(la.mlstm, np.random.default_rng(seed), B=B, T=T, H=H, K=K, V=V)
    return x | {"i": 2 * x["i"], "f": 3 + 2 * np.random.default_rng(seed + 1).standard_normal(x["f"].shape)}


def plainly(q, k, v, i, f):
    """C_t and n_t as the paper has them, without m; complex numbers go through, each side of a maximum by its real
    part."""
    B, T, H, K = q.shape
    dtype = np.result_type(q, k, v, i, f)
    C, n, out = np.zeros((B, H, K, V), dtype), np.zeros((B, H, K), dtype), np.zeros((B, T, H, V), dtype)
    for t in range(T):
        keep, write = 1 / (1 + np.exp(-f[:, t])), np.exp(i[:, t])
        C = keep[..., None, None] * C + write[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        n = keep[..., None] * n + write[..., None] * k[:, t]
        r = K**-0.5 * np.einsum("bhk,bhk->bh", q[:, t], n)
        below = np.where(abs(r.real) > 1, np.sign(r.real) * r, 1)
        out[:, t] = K**-0.5 * np.einsum("bhk,bhkv->bhv", q[:, t], C) / below[..., None]
    return out


@pytest.mark.parametrize("chunk_size", [1, 8, None, "parallel"])
def test_the_gauge_does_not_show(chunk_size):
    x = drawn()
    assert relative_error(la.mlstm(**x, chunk_size=chunk_size), plainly(**x)) <= 1e-13


@pytest.mark.parametrize("name", ["q", "k", "v", "i", "f"])
def test_gradients_by_a_complex_step(name):
    """Every gradient along one direction, to the last digits: the normaliser's part included."""
    x, rng = drawn(), np.random.default_rng(5)
    out, pullback = la.vjp(la.mlstm, **x)
    dout, d = rng.standard_normal(out.shape), rng.standard_normal(x[name].shape)
    exact = np.sum(plainly(**x | {name: x[name] + 1j * STEP * d}).imag * dout) / STEP
    assert abs(np.sum(getattr(pullback(dout), name) * d) - exact) <= 1e-12 * abs(exact)


def test_both_sides_of_the_normaliser_are_taken():
    x = drawn()
    r = abs(la.simple_gla(x["q"], x["k"], np.exp(x["i"])[..., None], -np.logaddexp(0, -x["f"])))
    assert 0.1 < (r > 1).mean() < 0.9


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": [0, 0, 4, 5, 5, 23]}], ids=["a batch", "ragged"])
def test_any_gauge_is_the_same_state(options):
    """Only e^m S and e^m n matter: outputs and gradients are the same in every gauge."""
    ragged, rng = "cu_seqlens" in options, np.random.default_rng(3)
    x = drawn(B=(1,) if ragged else (2,))
    lead = (5,) if ragged else (2,)
    state = la.testing.sample_state(la.mlstm, rng, lead, {}, H=H, K=K, V=V)
    c = rng.uniform(-3, 3, (*lead, H))
    other = la.StabilisedState(np.exp(-c)[..., None, None] * state.S, np.exp(-c)[..., None] * state.n, state.m + c)
    results = []
    for begin in (state, other):
        (out, end), pullback = la.vjp(la.mlstm, **x, state=begin, return_state=True, **options)
        stored = np.exp(end.m)[..., None, None] * end.S
        dS = np.exp(end.m)[..., None, None] * np.ones_like(end.S)  # of the sum of e^m S
        grads = pullback(np.ones_like(out), (dS, 0 * end.n, np.sum(dS * end.S, axis=(-2, -1))))
        # what e^m S and e^m n get, and m beside them nothing
        own = np.exp(-begin.m)
        moved = (own[..., None, None] * grads.state.S, own[..., None] * grads.state.n)
        left = grads.state.m - np.sum(grads.state.S * begin.S, axis=(-2, -1)) - np.sum(grads.state.n * begin.n, axis=-1)
        assert abs(left).max() <= 1e-12 * abs(grads.state.m).max()
        results.append([out, stored, *grads[:-1], *moved])
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) <= 1e-12


@pytest.mark.parametrize("options", [{}, {"soft_cap": 1.5}, {"forget_gate": "exp"}], ids=str)
def test_gradients_through_m(options):
    """A new maximum at the end, in the middle, and none at all: m_T comes from i_T, from i_j, from m_0."""
    for t in (8, 3, None):
        x = drawn(T=9, B=(1,))
        x["i"], x["f"] = np.minimum(x["i"], 1) - 4, x["f"] - 6 * ("forget_gate" in options)
        if t is not None:
            x["i"][:, t - 1] = 2.5
        state = la.testing.sample_state(la.mlstm, np.random.default_rng(0), (1,), {}, H=H, K=K, V=V)
        check_vjp(la.mlstm, **x, state=state, **options)


def gates(kind, rng, shape):
    """Gates of up to +-30."""
    t = np.arange(shape[1])[None, :, None] + np.zeros(shape)
    return {
        "both at random": (rng.uniform(-30, 30, shape), rng.uniform(-30, 30, shape)),
        "nothing is forgotten": (rng.uniform(-30, 30, shape), np.full(shape, 30.0)),
        "all is forgotten": (rng.uniform(-30, 30, shape), np.full(shape, -30.0)),
        "open": (np.full(shape, 30.0), np.full(shape, 30.0)),
        "shut": (np.full(shape, -30.0), np.full(shape, 30.0)),
        "in turn": (np.where(t % 2 == 0, 30.0, -30.0), rng.uniform(0, 6, shape)),
    }[kind]


KINDS = ("both at random", "nothing is forgotten", "all is forgotten", "open", "shut", "in turn")


@pytest.mark.parametrize("backend", ["numba", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_holds_for_gates_of_thirty_over_16384_tokens(kind, backend):
    """Against float64 on the same numbers: outputs, state and gradients to 50 eps of their largest entry.

    q and k are >= 0: with signs q n comes near 0 somewhere, and the quotient is then as large as it likes in any dtype.
    """
    rng, T = np.random.default_rng(0), 16384
    i, f = gates(kind, rng, (1, T, 1))
    x = {"q": abs(rng.standard_normal((1, T, 1, 8))), "k": abs(rng.standard_normal((1, T, 1, 8))),
         "v": rng.standard_normal((1, T, 1, 4)), "i": i, "f": f}  # fmt: skip
    x = {n: y.astype(np.float32) for n, y in x.items()}
    found, pullback = la.vjp(la.mlstm, **x, return_state=True, backend=backend)
    wide, pull = la.vjp(la.mlstm, **{n: y.astype(np.float64) for n, y in x.items()}, return_state=True)
    dout = rng.standard_normal(found.out.shape).astype(np.float32)
    mine, exact = [*parts(found), *parts(pullback(dout))], [*parts(wide), *parts(pull(dout.astype(float)))]
    for a, b in zip(mine, exact, strict=True):
        assert a.dtype == np.float32
        assert np.isfinite(a).all()
        assert relative_error(a, b) <= 50 * 2.0**-23


def test_float32_stays_finite_with_signed_vectors():
    rng = np.random.default_rng(1)
    for kind in KINDS:
        x = la.testing.sample(la.mlstm, rng, B=(1,), T=2048, H=1, K=8, V=4)
        x["i"], x["f"] = gates(kind, rng, (1, 2048, 1))
        found, pullback = la.vjp(la.mlstm, **{n: y.astype(np.float32) for n, y in x.items()}, return_state=True)
        assert all(np.isfinite(y).all() for y in parts(found) + parts(pullback(*found)))


def test_a_query_of_zeros_reads_zeros_whatever_m():
    x = drawn()
    for level in (-300.0, 95.0, 300.0):  # e^{-m} overflows, is subnormal, or is 0
        x32 = {n: y.astype(np.float32) for n, y in (x | {"i": np.full_like(x["i"], level)}).items()}
        out, pullback = la.vjp(la.mlstm, **x32 | {"q": 0 * x32["q"]})
        assert not out.any()
        if level != 95:  # there dq is e^95, more than float32 has
            with np.errstate(over="ignore"):
                assert all(np.isfinite(d).all() for d in parts(pullback(np.ones_like(out))))


def test_a_state_is_read_without_writing():
    x, rng = drawn(B=()), np.random.default_rng(0)
    _, state = la.mlstm(**x, return_state=True)
    q = rng.standard_normal((6, 2 * H, K))
    wide = np.repeat(np.concatenate([state.S, state.n[..., None]], -1), 2, axis=0)
    num = K**-0.5 * np.einsum("thk,hkv->thv", q, wide)
    expected = num[..., :-1] / np.maximum(abs(num[..., -1:]), np.repeat(np.exp(-state.m), 2)[:, None])
    assert relative_error(la.read(q, state, scale=K**-0.5), expected) <= 1e-14
    check_vjp(la.read, q, state, scale=K**-0.5)
    assert relative_error(la.read(q, tuple(state), scale=K**-0.5), expected) <= 1e-14


def test_its_influence_matrix_is_its_parallel_form():
    """A_ij = r_ij / max(|sum_j r_ij|, e^{-m_i}), r_ij = scale q_i k_j e^{F_i - F_j + i_j - m_i}."""
    x = drawn(B=())
    F = np.cumsum(-np.logaddexp(0, -x["f"]), axis=0)
    log = np.where(np.tri(T)[..., None] > 0, F[:, None] - F[None] + x["i"][None], -np.inf)
    m = np.maximum(log.max(1), F)  # F: the decayed m_0 = 0
    r = K**-0.5 * np.einsum("ihk,jhk->ijh", x["q"], x["k"]) * np.exp(log - m[:, None])
    A = np.moveaxis(r / np.maximum(abs(r.sum(1)), np.exp(-m))[:, None], -1, 0)
    assert relative_error(la.influence_matrix(la.mlstm, **x), A) <= 1e-13


def test_simple_gla_where_the_normaliser_is_at_rest():
    """Small writes: |q n| stays below 1, and the gates are a decay and a factor of the values."""
    x = drawn()
    small = x["i"] - 20
    plain = la.simple_gla(x["q"], x["k"], np.exp(small)[..., None] * x["v"], -np.logaddexp(0, -x["f"]))
    assert relative_error(la.mlstm(**x | {"i": small}), plain) <= 1e-13


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"soft_cap": 0}, ValueError, "mlstm: soft_cap is 0, expected None or a finite number > 0"),
        ({"forget_gate": "relu"}, ValueError, "mlstm: forget_gate is 'relu', expected 'sigmoid' or 'exp'"),
        (
            {"state": np.zeros((2, H, K, V))},
            TypeError,
            "mlstm: state is a ndarray, expected (S, n, m) as a StabilisedState",
        ),
        (
            {"state": (np.zeros((2, H, K, V)), np.zeros((2, H, K)))},
            TypeError,
            "mlstm: state is a tuple of 2, expected three arrays (S, n, m) as a StabilisedState",
        ),
        (
            {"state": (np.zeros((2, H, K, V)), np.zeros((2, H, K)), np.zeros((2, H, 1)))},
            ValueError,
            "mlstm: state.m has shape (2, 2, 1), expected (B, H) = (2, 2)",
        ),
    ],
)
def test_bad_input_is_named(options, error, text):
    with pytest.raises(error) as raised:
        la.mlstm(**drawn(), **options)
    assert str(raised.value) == text


@pytest.mark.parametrize("T", [0, 1, 5])
def test_a_state_of_columns_of_one_array_is_not_part_of_results(T):
    """A returned state is read in place, but results never share memory with it."""
    (_, start), more = la.mlstm(**drawn(T=3), return_state=True), drawn(T=T)
    (out, end), pullback = la.vjp(la.mlstm, **more, state=start, return_state=True)
    both = np.ones((*start.S.shape[:-1], start.S.shape[-1] + 1))
    dend = type(end)(both[..., :-1], both[..., -1], np.ones_like(end.m))
    grads = pullback(out, dend)
    for y in (*end, *grads.state):
        assert not any(np.shares_memory(y, given) for given in (*start, *dend))
    apart = pullback(out, type(end)(*(y.copy() for y in dend)))
    assert all(np.array_equal(x, y) for x, y in zip(grads.state, apart.state, strict=True))
