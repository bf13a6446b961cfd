"""return_lse and merge: the log sums of softmax attention, their gradients, and attention put together from parts."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.foreign import leaves
from linattn_np.softmax.core import unsupported_reason

T, K, V, H = 23, 5, 3, 2
CUTS = [0, 4, 4, 15, 23]
HOWS = ({"backend": "reference"}, {"backend": "chunks", "chunk_size": 16}, {"backend": "numba"},
        {"backend": "numba", "chunk_size": 8}, {"backend": "numba", "chunk_size": 1})  # fmt: skip
every_how = pytest.mark.parametrize("how", HOWS, ids=str)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def cache(L=6):
    return la.KeyValueCache(normal(2, L, H, K, seed=5), normal(2, L, H, V, seed=5), np.array([L - 2, L]))


def draw(B=2, Tq=T, Hq=H, **more):
    arrays = {"q": normal(B, Tq, Hq, K), "k": normal(B, T, H, K, seed=1), "v": normal(B, T, H, V)}
    return SimpleNamespace(arrays=arrays | {n: x for n, x in more.items() if hasattr(x, "ndim")},
                           options={n: x for n, x in more.items() if not hasattr(x, "ndim")})  # fmt: skip


bias = normal(2, T, H, T)
bias[:, 7, 1] = -np.inf  # a query that reads nothing
CALLS = {
    "plain": draw(),
    "window": draw(window=4),
    "all keys": draw(causal=False),
    "own queries": draw(Tq=7, causal=False),
    "last queries": draw(Tq=7),
    "sinks": draw(sinks=normal(H)),
    "groups": draw(Hq=2 * H, sinks=normal(2 * H)),
    "bias": draw(bias=bias),
    "bias and sinks": draw(bias=bias, sinks=normal(H)),
    "cache": draw(state=cache(), return_state=True),
    "cache and window": draw(state=cache(), window=9, return_state=True),
    "ragged": draw(B=1, cu_seqlens=CUTS, return_state=True),
    "ragged, all keys": draw(B=1, cu_seqlens=CUTS, causal=False),
    "reverse": draw(reverse=True),
    "positions": draw(return_states_at=[3, 9], return_state=True),
}
every_call = pytest.mark.parametrize("name", CALLS)


def log_sums(q, k, v, sinks=None, bias=None, window=None, causal=True, state=None, cu_seqlens=None, reverse=False,
             **_):  # fmt: skip
    """log(e^{sink} + sum e^z), query by query."""
    B, Tq, Hq, _ = q.shape
    found = np.zeros((B, Tq, Hq))
    for b, t, h in np.ndindex(B, Tq, Hq):
        if cu_seqlens is None:
            first, last, at = 0, T, t + (T - Tq) * (causal and Tq < T)
        else:
            first, last = next((a, e) for a, e in itertools.pairwise(cu_seqlens) if a <= t < e)
            at = t
        keys = range(first, last)
        if causal:
            keys = [j for j in keys if (j >= at if reverse else j <= at) and (window is None or abs(at - j) < window)]
        group = h * H // Hq
        z = [K**-0.5 * q[b, t, h] @ k[b, j, group] + (0 if bias is None else bias[b, t, h, j]) for j in keys]
        if state is not None:
            n, L = int(state.length[b]), state.k.shape[1]
            z += [K**-0.5 * q[b, t, h] @ state.k[b, p % L, group] for p in range(max(n - L, 0), n)
                  if window is None or n + at - p < window]  # fmt: skip
        z += [] if sinks is None else [sinks[h]]
        found[b, t, h] = np.logaddexp.reduce(np.array(z, np.float64)) if z else -np.inf
    return found


def given(call, **changed):
    return {**call.arrays, **changed, **call.options}


def near(a, b, eps=1e-12):
    np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
    a, b = (np.where(np.isneginf(x), 0, x) for x in (a, b))
    assert a.shape == b.shape
    assert np.all(np.abs(a - b) <= eps * (1 + np.abs(b))), np.abs(a - b).max()


@every_how
@every_call
def test_log_sums_are_their_definition_and_the_rest_is_the_plain_call(name, how):
    call = CALLS[name]
    found = la.softmax_attention(**given(call), **how, return_lse=True)
    plain = la.softmax_attention(**given(call), **how)
    near(found.lse, log_sums(**given(call)))
    plain = plain if isinstance(plain, tuple) else (plain,)
    for a, b in zip(leaves((found.out, *found[2:])), leaves(tuple(plain)), strict=True):
        np.testing.assert_array_equal(a, b)


@every_how
@every_call
def test_gradients_of_log_sums_are_central_differences(name, how):
    call, step = CALLS[name], 1e-5
    result, pullback = la.vjp(la.softmax_attention, **given(call), **how, return_lse=True)
    lse = np.where(np.isneginf(result.lse), 0, result.lse)
    dout, dlse = normal(*result.out.shape), np.where(np.isneginf(result.lse), 0, normal(*lse.shape))

    def value(**changed):
        out, log = la.softmax_attention(**given(call, **changed), **how, return_lse=True)[:2]
        return np.sum(out * dout) + np.sum(np.where(np.isneginf(log), 0, log) * dlse)

    grads = pullback(dout, dlse)
    for array, x in call.arrays.items():
        along = normal(*x.shape, seed=3)
        numeric = (value(**{array: x + step * along}) - value(**{array: x - step * along})) / (2 * step)
        d = np.where(np.isneginf(x), 0, getattr(grads, array))
        size = 1 + np.sqrt(np.sum(d**2) * np.sum(along**2))
        assert abs(np.sum(d * along) - numeric) <= 1e-7 * size, array
    if (state := call.options.get("state")) is not None:
        along = normal(*state.k.shape, seed=3)
        call_at = lambda s: value(state=state._replace(k=state.k + s * along))  # noqa: E731
        rest = {n: x for n, x in call.options.items() if n != "state"}
        call = SimpleNamespace(arrays=call.arrays, options=rest)
        numeric = (call_at(step) - call_at(-step)) / (2 * step)
        assert abs(np.sum(grads.state.k * along) - numeric) <= 1e-6 * (1 + abs(numeric))
    alone = pullback(None, dlse)
    both = pullback(dout)
    for array in call.arrays:
        near(getattr(alone, array) + getattr(both, array), getattr(grads, array), 1e-11)


def test_layouts_steps_and_narrow_numbers(library):
    call = CALLS["plain"]
    q, k, v = (library.bring(np.swapaxes(x, 1, 2).astype(np.float32).copy()) for x in call.arrays.values())
    found, pullback = la.vjp(la.softmax_attention, q, k, v, layout="heads_first", return_lse=True)
    wanted, expected = la.vjp(la.softmax_attention, **call.arrays, return_lse=True)
    near(library.see(found.lse), np.swapaxes(wanted.lse, 1, 2), 1e-5)
    assert isinstance(found.lse, library.kind)
    assert isinstance(found.out, library.kind)
    d = normal(2, T, H).astype(np.float32)
    grads, exact = pullback(None, library.bring(np.swapaxes(d, 1, 2).copy())), expected(None, d)
    for a, b in zip(grads[:3], exact[:3], strict=True):
        near(library.see(a), np.swapaxes(b, 1, 2), 1e-4)
    one = {n: library.bring(x[:, 3].astype(np.float32)) for n, x in call.arrays.items()}
    near(library.see(la.step(la.softmax_attention, **one, return_lse=True).lse),
         K**-0.5 * np.sum(call.arrays["q"][:, 3] * call.arrays["k"][:, 3], -1), 1e-5)  # fmt: skip


def test_log_sums_of_narrow_numbers_are_float32():
    narrow = {n: x.astype(np.float16) for n, x in CALLS["plain"].arrays.items()}
    out, lse = la.softmax_attention(**narrow, return_lse=True)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(out, la.softmax_attention(**narrow))
    near(lse, log_sums(**{n: x.astype(np.float64) for n, x in narrow.items()}), 1e-6)
    both = la.merge(out, lse, out, lse)
    assert (both.out.dtype, both.lse.dtype) == (np.float16, np.float32)


# merge


def halves(causal=False, cut=9, **options):
    q, k, v = CALLS["plain"].arrays.values()
    first = functools.partial(la.softmax_attention, causal=False, return_lse=True, **options)
    return [first(q, k[:, a:b], v[:, a:b]) for a, b in ((0, cut), (cut, T))]


@pytest.mark.parametrize("cut", [0, 1, 9, T])
def test_two_halves_of_the_keys_are_the_whole(cut):
    call = CALLS["all keys"]
    whole, expected = la.vjp(la.softmax_attention, **given(call), return_lse=True)
    q, k, v = call.arrays.values()
    parts = [la.vjp(la.softmax_attention, q, k[:, a:b], v[:, a:b], causal=False, return_lse=True)
             for a, b in ((0, cut), (cut, T))]  # fmt: skip
    merged, pullback = la.vjp(la.merge, *parts[0][0], *parts[1][0])
    near(merged.out, whole.out)
    near(merged.lse, whole.lse)
    dout, dlse = normal(*whole.out.shape), normal(*whole.lse.shape)
    d = pullback(dout, dlse)
    own = [parts[0][1](d.out1, d.lse1), parts[1][1](d.out2, d.lse2)]
    exact = expected(dout, dlse)
    near(own[0].q + own[1].q, exact.q)
    for name in "kv":
        near(np.concatenate([getattr(y, name) for y in own], 1), getattr(exact, name))


def test_any_order_and_any_number_of_parts_is_the_whole():
    q, k, v = CALLS["all keys"].arrays.values()
    whole = la.softmax_attention(q, k, v, causal=False, return_lse=True)
    parts = [la.softmax_attention(q, k[:, n::4], v[:, n::4], causal=False, return_lse=True) for n in (2, 0, 3, 1)]
    found = functools.reduce(lambda a, b: la.merge(*a, *b), parts)
    near(found.out, whole.out)
    near(found.lse, whole.lse)


def test_a_part_without_keys_is_the_identity_to_the_bit():
    out, lse = halves()[0]
    none, low = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for given_parts, names in (((out, lse, none, low), "12"), ((none, low, out, lse), "21")):
        found, pullback = la.vjp(la.merge, *given_parts)
        np.testing.assert_array_equal(found.out, out)
        np.testing.assert_array_equal(found.lse, lse)
        d = pullback(out, lse)
        np.testing.assert_array_equal(getattr(d, f"out{names[0]}"), out)
        np.testing.assert_array_equal(getattr(d, f"lse{names[0]}"), lse)
        assert not np.any(getattr(d, f"out{names[1]}"))
        assert not np.any(getattr(d, f"lse{names[1]}"))
    empty = la.merge(none, low, none, low)
    assert not np.any(empty.out)
    assert np.all(np.isneginf(empty.lse))


def test_gradients_of_merge_are_central_differences():
    arrays = dict(zip(("out1", "lse1", "out2", "lse2"), (*halves()[0], *halves()[1]), strict=True))
    result, pullback = la.vjp(la.merge, **arrays)
    dout, dlse, step = normal(*result.out.shape), normal(*result.lse.shape), 1e-5
    value = lambda **own: sum(np.sum(a * b) for a, b in zip(la.merge(**own), (dout, dlse), strict=True))  # noqa: E731
    grads = pullback(dout, dlse)
    for name, x in arrays.items():
        along = normal(*x.shape, seed=2)
        numeric = (value(**arrays | {name: x + step * along}) - value(**arrays | {name: x - step * along})) / (2 * step)
        assert abs(np.sum(getattr(grads, name) * along) - numeric) <= 1e-7 * (1 + abs(numeric)), name


def test_merge_in_every_library(library):
    arrays = [library.bring(x.astype(np.float32)) for x in (*halves()[0], *halves()[1])]
    found, pullback = la.vjp(la.merge, *arrays)
    wanted, expected = la.vjp(la.merge, *halves()[0], *halves()[1])
    assert isinstance(found.out, library.kind)
    assert isinstance(found.lse, library.kind)
    dout, dlse = normal(*wanted.out.shape), normal(*wanted.lse.shape)
    grads = pullback(*(library.bring(x.astype(np.float32)) for x in (dout, dlse)))
    for a, b in zip((*found, *grads), (*wanted, *expected(dout, dlse)), strict=True):
        near(library.see(a), b, 1e-5)


# frameworks


def attended(q, k, v, **options):
    """The outputs of attention in two halves, merged, and of causal attention."""
    halves = [la.softmax_attention(q, k[:, a:b], v[:, a:b], causal=False, return_lse=True, **options)
              for a, b in ((0, 9), (9, T))]  # fmt: skip
    merged = la.merge(*halves[0], *halves[1])
    whole = la.softmax_attention(q, k, v, return_lse=True, **options)
    return *merged, *whole


def scored(found, bring):
    return sum((y * bring(normal(*y.shape))).sum() for y in found)


def wanted_gradients():
    q, k, v = CALLS["plain"].arrays.values()
    (out, lse), pullback = la.vjp(la.softmax_attention, q, k, v, causal=False, return_lse=True)
    of_own = la.vjp(la.softmax_attention, q, k, v, return_lse=True)[1]
    d, e = (pull(normal(*out.shape), normal(*lse.shape)) for pull in (pullback, of_own))
    return [a + b for a, b in zip(d[:3], e[:3], strict=True)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_and_compiled_graphs_of_torch(compiled):
    torch = pytest.importorskip("torch")
    import linattn_np.bridges.torch  # noqa: F401  # torch.compile cannot trace the import in a first call

    arrays = [torch.tensor(x, requires_grad=True) for x in CALLS["plain"].arrays.values()]
    call = torch.compile(attended, fullgraph=True, backend="aot_eager") if compiled else attended
    loss = scored(call(*arrays), torch.as_tensor)
    for d, exact in zip(torch.autograd.grad(loss, arrays), wanted_gradients(), strict=True):
        near(d.numpy(), exact)


@pytest.mark.parametrize("options", [{}, {"backend": "chunks"}], ids=str)
def test_jit_grad_and_vmap_of_jax(options):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        arrays = [jax.numpy.asarray(x) for x in CALLS["plain"].arrays.values()]
        loss = lambda *given: scored(attended(*given, **options), jax.numpy.asarray)  # noqa: E731
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
        for d, exact in zip(found, wanted_gradients(), strict=True):
            near(d, exact, 1e-11)
        one = jax.vmap(lambda q, k, v: la.softmax_attention(q, k, v, return_lse=True, **options))(*arrays)
        near(one[1], la.softmax_attention(*CALLS["plain"].arrays.values(), return_lse=True).lse, 1e-11)
        pulled = la.vjp(la.softmax_attention, *arrays, return_lse=True)[1](None, jax.numpy.ones((2, T, H)))
        near(pulled.q, la.vjp(la.softmax_attention, *CALLS["plain"].arrays.values(), return_lse=True)[1](
            None, np.ones((2, T, H))).q, 1e-11)  # fmt: skip


def test_explain_says_why_kernels_do_not_give_log_sums():
    found = la.explain(la.softmax_attention, *CALLS["plain"].arrays.values(), return_lse=True)
    assert found.backend == "numba"
    plan = SimpleNamespace(xp=SimpleNamespace(__name__="cupy"), lse=True)
    assert "return_lse=True makes array calls" in unsupported_reason(None, plan, "cuda")


def test_errors():
    arrays = CALLS["plain"].arrays
    q, k, v = arrays.values()
    for error, call, text in (
        (ValueError, lambda: la.softmax_attention(q, k, v, return_lse=True, normalize=False), "return_lse=True with"),
        (TypeError, lambda: la.softmax_attention(q, k, v, return_lse=1), "return_lse is 1, expected True or False"),
        (
            TypeError,
            lambda: la.forgetting_attention(q, k, v, q[..., 0], return_lse=True),
            "unknown option 'return_lse'",
        ),
        (
            ValueError,
            lambda: la.influence_matrix(la.softmax_attention, q, k, v, return_lse=True),
            "return_lse is given",
        ),
        (ValueError, lambda: la.vjp(la.softmax_attention, q, k, v, return_lse=True)[1](None, q), r"dlse has shape"),
        (ValueError, lambda: la.vjp(la.softmax_attention, q, k, v, return_lse=True)[1](q), r"dout has shape"),
        (TypeError, lambda: la.vjp(la.softmax_attention, q, k, v, return_lse=True)[1](), "neither dout"),
        (ValueError, lambda: la.merge(v, q[..., 0], v, q), r"merge: lse2 has shape .*expected"),
        (TypeError, lambda: la.merge(v, v[..., 0]), "merge: out2 is missing"),
    ):
        with pytest.raises(error, match=text):
            call()
