"""The CUDA kernels of the delta rule, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.delta import plan as cuda_delta_plan
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.device_arrays import check_made_again, check_same_bits, error, same, typed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
RATES = (0.0, 0.001, 0.05, 5.0, np.inf)  # of the log decay, cyclic over heads; inf: a tenth of the entries is -inf
STRENGTHS = ((0, 1), (0, 2), (1, 1), (0, 1e-6), None)  # of beta, cyclic over heads; None: 0, 1 and 2
NAMES = ("q", "k", "v", "g", "beta")
OUT, GRADS, GATES = 6e-3, 8e-3, 2e-2  # of the norm of the result; of a head's for the gates


def draw(B=(2,), T=97, Hq=5, Hk=5, H=5, K=128, V=128, seed=0, states=None, norm=1.0, decay=True, dtype="bfloat16"):
    """Rounded q, k, v, g, beta, initial state, dout, dstate."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((*B, T, h, D)) for h, D in ((Hq, K), (Hk, K), (H, V)))
    k *= norm / np.linalg.norm(k, axis=-1, keepdims=True)
    q, k, v = (x.astype(typed(dtype)) for x in (q, k, v))
    u, w = rng.uniform(0, 1, (2, *B, T, H))
    rate = np.array([RATES[h % len(RATES)] for h in range(H)])
    g = -np.where(np.isinf(rate), 0.1, rate) * 2 * u
    g = np.where(np.isinf(rate) & (u < 0.1), -np.inf, g).astype(np.float32)
    beta = np.empty_like(g)
    for h in range(H):
        kind = STRENGTHS[(h + h // len(RATES)) % len(STRENGTHS)]
        beta[..., h] = np.floor(3 * w[..., h]) if kind is None else kind[0] + (kind[1] - kind[0]) * w[..., h]
    state, dstate = rng.standard_normal((2, *(states or B), H, K, V)).astype(np.float32)
    dout = rng.standard_normal((*B, T, max(Hq, H), V)).astype(typed(dtype))
    return q, k, v, g if decay else None, beta, state, dout, dstate


def function(arrays):
    q, k, v, g, beta = arrays[:5]
    return (la.delta_rule, [q, k, v, beta]) if g is None else (la.gated_delta_rule, [q, k, v, g, beta])


def both(fn, arrays, state, dout, dstate, **options):
    (out, end), pull = la.vjp(fn, *arrays, state=state, return_state=True, **options)
    grads = pull(dout, dstate)
    return {"out": out, "state": end} | {f"d{n}": y for n, y in grads._asdict().items() if y is not None}


def found_errors(cp, arrays, **options):
    """Errors by name, of gates and strengths by head too; forward and backward, with states at both ends."""
    fn, given = function(arrays)
    state, dout, dstate = arrays[5:]
    wide = both(
        fn,
        [x.astype(np.float64) for x in given],
        state.astype(np.float64),
        dout.astype(np.float64),
        dstate.astype(np.float64),
        **options,
    )
    there = both(
        fn,
        [cp.asarray(x) for x in given],
        cp.asarray(state),
        cp.asarray(dout),
        cp.asarray(dstate),
        **options,
        backend="cuda",
    )
    assert there["out"].dtype == given[0].dtype
    found = {n: error(there[n], y) for n, y in wide.items() if n not in ("dg", "dbeta")}
    for n in ("dg", "dbeta"):
        if n in wide:
            found |= {f"{n}{h}": error(there[n][..., h], wide[n][..., h]) for h in range(wide[n].shape[-1])}
    return found


def bound_of(name):
    return OUT if name in ("out", "state") else GATES if name.startswith(("dg", "dbeta")) else GRADS


def compare(cp, arrays, factor=1.0, **options):
    found = found_errors(cp, arrays, **options)
    assert not {n: float(e) for n, e in found.items() if not e <= factor * bound_of(n)}


@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (128, 64), (64, 128), (40, 120), (32, 16)])
def test_widths(cp, widths):
    compare(cp, draw(K=widths[0], V=widths[1], T=150))


def test_narrow_keys(cp):
    """Sixty-four keys in eight dimensions nearly repeat, so that 16-bit operands lose a digit."""
    found = found_errors(cp, draw(K=8, V=16, T=150))
    assert all(e <= 3 * bound_of(n) for n, e in found.items()), found


@pytest.mark.parametrize("T", [17, 63, 64, 65, 127, 257, 521])
def test_lengths(cp, T):
    compare(cp, draw(T=T, seed=T))


@pytest.mark.parametrize("heads", [(1, 1, 4), (4, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)])
def test_grouped_heads(cp, heads):
    Hq, Hk, H = heads
    compare(cp, draw(Hq=Hq, Hk=Hk, H=H, T=140))


@pytest.mark.parametrize("T", [140, 1100])
def test_shared_keys_have_the_bits_of_repeated_ones(cp, T):
    q, k, *rest = (cp.asarray(x) for x in draw(B=(1,), Hq=2, Hk=2, H=4, T=T))
    shared, repeated = (
        both(la.gated_delta_rule, [*x, *rest[:3]], *rest[3:], backend="cuda")
        for x in ((q, k), (cp.repeat(q, 2, axis=2), cp.repeat(k, 2, axis=2)))
    )
    for n in ("out", "state", "dv", "dg", "dbeta", "dstate"):
        assert bool((shared[n].astype(cp.float32) == repeated[n].astype(cp.float32)).all()), n


OFFSETS = [0, 5, 5, 70, 97, 300, 301]


@pytest.mark.parametrize("D", [64, 128])
def test_ragged(cp, D):
    compare(cp, draw(B=(1,), T=301, K=D, V=D, states=(6,)), cu_seqlens=OFFSETS)


@pytest.mark.parametrize("offsets", [None, [0, 3, 1100, 1100, 1700]])
def test_segments(cp, offsets):
    assert cuda_delta_plan.segments(5, 27, launch.multiprocessors()) > 1
    options = {} if offsets is None else {"cu_seqlens": offsets}
    compare(cp, draw(B=(1,), T=1700, states=None if offsets is None else (4,)), **options)


@pytest.mark.parametrize("T", [150, 1100])
def test_no_decay(cp, T):
    compare(cp, draw(B=(1,), T=T, decay=False))


def test_blocks_made_again(cp, monkeypatch):
    """Residuals that the forward did not store are recomputed, to the same bits."""
    arrays = draw(B=(1,), T=600)
    fn, given = function(arrays)
    there = [cp.asarray(x) for x in (*given, *arrays[5:])]
    kept = both(fn, there[:5], *there[5:], backend="cuda")
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)  # looked at by replayed calls too
    made = both(fn, there[:5], *there[5:], backend="cuda")
    assert all(same(kept[n], made[n]) for n in kept)


@pytest.mark.parametrize("T", [150, 1700])
@pytest.mark.parametrize("states", [False, True])
def test_vjp_made_again(cp, monkeypatch, T, states):
    """Replayed on other numbers, into memory full of NaN, forward and pullback have the same bits."""

    def every(one):
        out, pull = la.vjp(la.gated_delta_rule, *one[:5], state=one[5] if states else None, backend="cuda")
        return [out, *(y for y in pull(one[6], one[7] if states and T > 1000 else None) if y is not None)]

    sets = [[cp.asarray(x) for x in draw(B=(1,), T=T, Hq=2, Hk=2, H=4, seed=seed)] for seed in range(3)]
    check_made_again(cp, monkeypatch, every, sets)
    pull = la.vjp(la.gated_delta_rule, *sets[0][:5], state=sets[0][5], backend="cuda")[1]
    assert pull(sets[0][6], sets[0][7]).state.shape == sets[0][5].shape  # other cotangents


def test_one_key(cp):
    """One key at every token, nothing forgotten: bfloat16 has a product of keys, 1.0003 say, as 1 in every row of A."""
    arrays = list(draw(B=(2,), T=1000, Hq=4, Hk=4, H=4))
    for seed in range(4):
        key = np.random.default_rng(seed).standard_normal((2, 1, 4, 128))
        arrays[1] = np.broadcast_to(key / np.linalg.norm(key, axis=-1, keepdims=True), arrays[1].shape)
        arrays[1] = arrays[1].astype(arrays[0].dtype)
        arrays[3], arrays[4] = np.zeros_like(arrays[3]), np.ones_like(arrays[4])
        found = found_errors(cp, arrays)
        assert found["out"] < 1.6e-2, found  # N in bfloat16 alone: 1.4e-2
        assert found["state"] < 2.4e-2, found


def test_long_keys(cp):
    """Keys of length 1.4 with a strength of 1: the erased part nearly changes its sign."""
    arrays = list(draw(T=300, norm=1.4))
    arrays[4] = np.minimum(arrays[4], 1)
    compare(cp, arrays)


def test_equal_keys(cp):
    """One key all the time: 16-bit operands cost digits at strength 1, all of them at 2, and nothing becomes NaN."""
    q, k, v, g, beta, *rest = draw(B=(1,), T=300, decay=False)
    k[:] = k[:, :1]
    beta[:] = 1
    found = found_errors(cp, (q, k, v, g, beta, *rest))
    assert max(found.values()) <= 6e-2, found
    beta[:] = 2
    assert np.isfinite(list(found_errors(cp, (q, k, v, g, beta, *rest)).values())).all()


def test_hard_resets_and_strong_decay(cp):
    q, k, v, g, beta, *rest = draw(T=300)
    g[..., :] = -50
    g[:, ::7] = -np.inf
    g[:, 3::7] = 0
    found = found_errors(cp, (q, k, v, g, beta, *rest))
    assert all(e <= bound_of(n) for n, e in found.items() if not n.startswith("dg")), found


def test_views_are_read_in_place(cp):
    q, k, v, g, beta, *_ = draw(T=80, H=4, Hq=4, Hk=4)
    there = [cp.asarray(x) for x in (q, k, v, g, beta)]
    plain = la.gated_delta_rule(*there, backend="cuda")
    turned = la.gated_delta_rule(
        *(cp.ascontiguousarray(cp.moveaxis(x, 1, 2)) for x in there), layout="heads_first", backend="cuda"
    )
    assert same(cp.moveaxis(turned, 1, 2), plain)
    doubled = [cp.repeat(x, 2, axis=1)[:, ::2] for x in there]
    assert same(la.gated_delta_rule(*doubled, backend="cuda"), plain)
    shifted = [cp.concatenate([x[..., :1], x], axis=-1)[..., 1:] for x in there[:3]]
    assert same(la.gated_delta_rule(*shifted, *there[3:], backend="cuda"), plain)
    wide = [x[None, None] for x in there]
    assert same(la.gated_delta_rule(*wide, backend="cuda")[0, 0], plain)


@pytest.mark.parametrize("T", [150, 1100])
def test_a_call_made_again_takes_the_new_arrays(cp, T):
    """Calls like an earlier one are launched as that was, with other pointers, in tensor maps too."""
    sets = [[cp.asarray(x) for x in draw(B=(1,), T=T, seed=seed)[:6]] for seed in range(3)]
    for _ in range(2):
        for *arrays, state in sets:
            again = la.gated_delta_rule(*arrays, state=state, return_state=True, backend="cuda")
            planned, _ = la.vjp(la.gated_delta_rule, *arrays, state=state, return_state=True, backend="cuda")
            for a, b in zip(again, planned, strict=True):
                assert same(a, b)


def test_same_bits(cp):
    """Alone, in a batch, in a ragged batch, with the state handed over between chunks, and on ten runs."""
    *arrays, state, dout, dstate = draw(B=(3,), T=192, H=4, Hq=4, Hk=4)
    check_same_bits(cp, la.gated_delta_rule, dict(zip(NAMES, arrays, strict=True)), state, dout, dstate, at=(64,))


def test_causality_to_the_bit(cp):
    there = [cp.asarray(x) for x in draw(B=(1,), T=300)[:5]]
    before = la.gated_delta_rule(*there, backend="cuda")
    changed = [x.copy() for x in there]
    for x in changed[:3]:
        x[:, 150:] = 0.05
    changed[4][:, 150:] = 0.5
    after = la.gated_delta_rule(*changed, backend="cuda")
    assert bool((before[:, :150] == after[:, :150]).all())


def test_nan_stays_in_its_head_and_sequence(cp):
    there = [cp.asarray(x) for x in draw(B=(1,), T=200, H=4, Hq=4, Hk=4)[:5]]
    there[2][0, 70, 1, 3] = np.nan
    there[1][0, 71, 3, 3] = np.nan
    out, pull = la.vjp(la.gated_delta_rule, *there, cu_seqlens=[0, 60, 130, 200], backend="cuda")
    grads = pull(cp.ones_like(out))
    for y in (out, grads.q, grads.k, grads.v, grads.beta[..., None], grads.g[..., None]):
        bad = cp.isnan(y.astype(cp.float32)).any(axis=-1)[0].get()
        assert not bad[:60].any()
        assert not bad[130:].any()
        assert not bad[:, [0, 2]].any()
    bad = cp.isnan(out.astype(cp.float32)).any(axis=-1)[0].get()
    assert bad[70:130, 1].all()
    assert bad[71:130, 3].all()


def test_some_cotangents(cp):
    """Only one of dout and dstate is given."""
    q, k, v, g, beta, state, dout, dstate = draw(T=100)
    wide = [x.astype(np.float64) for x in (q, k, v, g, beta)]
    there = [cp.asarray(x) for x in (q, k, v, g, beta)]
    _, pull = la.vjp(la.gated_delta_rule, *wide, state=state.astype(np.float64), return_state=True)
    _, pull2 = la.vjp(la.gated_delta_rule, *there, state=cp.asarray(state), return_state=True, backend="cuda")
    for given in ((dout, None), (None, dstate)):
        expected = pull(*(None if x is None else x.astype(np.float64) for x in given))
        actual = pull2(*(None if x is None else cp.asarray(x) for x in given))
        for name in ("k", "v", "beta", "state"):
            assert error(getattr(actual, name), getattr(expected, name)) <= GRADS, name


def test_it_is_taken_unasked(cp):
    there = [cp.asarray(x) for x in draw()[:5]]
    assert la.explain(la.gated_delta_rule, *there).backend == "cuda"
    assert "wgmma" in la.explain(la.gated_delta_rule, *there).reason
    odd = [x[..., :7] if n < 3 else x for n, x in enumerate(there)]
    assert "mma.sync" in la.explain(la.gated_delta_rule, *odd).reason
    single = [x.astype(cp.float32) for x in there]
    assert "mma.sync" in la.explain(la.gated_delta_rule, *single).reason
