"""The pieces of linattn_np.nn as CUDA kernels, emulated here or on a GPU: every case in every dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.foreign import leaves
from linattn_np.nn import ends
from linattn_np.ops.cuda import norms
from tests.cuda.emulation import device, emulated, public  # noqa: F401
from tests.nn.table import CASES, normal

STORAGE = [np.dtype(x) for x in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)]
KERNELS = [c for c in CASES if c.name != "linear" and c.label not in ("hidden", "each")]
cases = pytest.mark.parametrize("case", KERNELS, ids=lambda c: f"{c.name} {c.label}".strip())
dtypes = pytest.mark.parametrize("dtype", STORAGE, ids=str)


def parts(result):
    return [y for y in leaves((tuple(result) if isinstance(result, list) else result,)) if y is not None]


def near(found, expected, other, dtype, size):
    """Within rounding, or as near as array calls in this dtype are; size: of the terms of a sum."""
    eps = float(ml_dtypes.finfo(dtype).eps)
    found, expected, other = (np.asarray(x).astype(np.float64) for x in (found, expected, other))
    assert found.shape == expected.shape
    few = max((4 if dtype.itemsize == 2 else 64) * eps, 1e-13)
    wrong = np.abs(found - expected) - few * (size + np.abs(expected)) - 8 * np.abs(other - expected).max()
    assert np.all(wrong <= 0), (np.abs(found - expected).max(), wrong.max())


def computed(case, arrays, d=None, bring=np.asarray, **options):
    """(results, cotangents drawn for them, gradients by name)"""
    given = {n: bring(np.ascontiguousarray(x)) for n, x in (arrays | dict(case.whole)).items()}
    result, pullback = case.vjp(given, **options)
    d = [normal(*y.shape).astype(y.dtype) for y in parts(result)] if d is None else d
    return parts(result), d, pullback(*map(bring, d))


@dtypes
@cases
def test_a_piece_and_its_gradients(public, case, dtype):  # noqa: F811
    arrays = {n: x.astype(dtype) for n, x in case.arrays.items()}
    results, d, grads = computed(case, arrays, bring=public.bring)
    others, _, other_grads = computed(case, arrays, d, backend="reference")
    wide = [x.astype(np.float64) for x in d]
    exact, _, exact_grads = computed(case, {n: x.astype(np.float64) for n, x in arrays.items()}, wide,
                                     backend="reference")  # fmt: skip
    for y, expected, other in zip(results, exact, others, strict=True):
        assert case.fn.piece.kind.wide or public.see(y).dtype == dtype
        near(public.see(y), expected, other, dtype, 4.0)
    for name, x in case.arrays.items():
        found = public.see(getattr(grads, name))
        assert found.dtype == dtype
        terms = results[0].size / max(x.size, 1)
        near(found, getattr(exact_grads, name), getattr(other_grads, name), dtype, 16.0 + 4 * terms**0.5)
    if public.launched is not None:
        assert any(file.startswith("nn/") or file == "ops/formula.cu" for file, *_ in public.launched)


def compare(device, fn, arrays, **options):  # noqa: F811
    """Results and gradients against float64 array calls, and the same bits again."""
    dy = normal(*arrays["x"].shape).astype(arrays["x"].dtype)
    found = []
    for _ in range(2):
        y, pullback = la.vjp(getattr(la.nn, fn), **{n: device.bring(x) for n, x in arrays.items()}, **options)
        grads = pullback(device.bring(dy))
        found.append([device.see(z) for z in (y, *(getattr(grads, n) for n in arrays))])
    for one, again in zip(*found, strict=True):
        assert one.tobytes() == again.tobytes()
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    y, pullback = la.vjp(getattr(la.nn, fn), **wide, **options, backend="reference")
    grads = pullback(dy.astype(np.float64))
    count = arrays["x"].size / arrays["x"].shape[-1]
    for z, name in zip(found[0], ("y", *arrays), strict=True):
        exact = y if name == "y" else getattr(grads, name)
        kind = arrays["x" if name == "y" else name].dtype
        assert z.dtype == kind
        near(z, exact, exact, max(kind, arrays["x"].dtype, key=lambda k: ml_dtypes.finfo(k).eps), 16 + 4 * count**0.5)


BFLOAT16 = STORAGE[0]
WIDTHS = [(64, 37), (128, 40), (200, 3), (256, 18), (1000, 3), (1024, 9), (4096, 2), (5120, 3), (33000, 2)]


@pytest.mark.parametrize(("D", "count"), WIDTHS, ids=str)
@pytest.mark.parametrize("fn", ["rms_norm", "layer_norm", "l2_norm", "gated_norm", "softmax"])
def test_rows_of_every_width(public, fn, D, count):  # noqa: F811
    """Held by few lanes, by a warp and by a block, in one piece and several, or read again; parameters in float32."""
    arrays = {"x": normal(count, D).astype(BFLOAT16)}
    if fn == "gated_norm":
        arrays |= {"gate": normal(count, D)[::-1].astype(BFLOAT16), "weight": normal(D).astype(np.float32)}
    elif fn.endswith("s_norm") or fn == "layer_norm":
        arrays |= {"weight": normal(D).astype(np.float32), "bias": normal(1, D)[0].astype(np.float32)}
    compare(public, fn, arrays)


@pytest.mark.parametrize("D", [70, 128, 4096 + 6])
def test_losses_of_rows_of_every_width(public, D):  # noqa: F811
    x, labels = normal(5, D).astype(BFLOAT16), np.array([0, D - 1, -100, 3, 7])
    loss, pullback = la.vjp(la.nn.cross_entropy, public.bring(x), public.bring(labels), z_loss=0.01)
    exact, exact_pullback = la.vjp(la.nn.cross_entropy, x.astype(np.float64), labels, z_loss=0.01)
    one = np.ones((), np.float32)
    near(public.see(loss), exact, exact, one.dtype, 1.0)
    near(public.see(pullback(public.bring(one)).x), *2 * (exact_pullback(np.ones(())).x,), BFLOAT16, 0.1)


@pytest.mark.parametrize("D", [70, 4096 + 6])
def test_losses_of_logits_far_from_0_and_without_columns(public, D):  # noqa: F811
    """Most columns are -inf, the others near -300."""
    x = np.full((4, D), -np.inf, np.float32)
    x[:, 3:9] = normal(4, 6) - 300
    labels = np.array([3, 4, 5, 8])
    loss, pullback = la.vjp(la.nn.cross_entropy, public.bring(x), public.bring(labels), reduction="sum")
    few = x[:, 3:9].astype(np.float64)
    exact, exact_pullback = la.vjp(la.nn.cross_entropy, few, labels - 3, reduction="sum")
    near(public.see(loss), exact, exact, x.dtype, 300.0)
    dx = public.see(pullback(public.bring(np.ones((), np.float32))).x)
    near(dx[:, 3:9], *2 * (exact_pullback(np.ones(())).x,), x.dtype, 8.0)
    assert not np.delete(dx, range(3, 9), axis=1).any()


@pytest.mark.parametrize("label", [-1, 70])
def test_a_label_that_is_no_column_has_no_number_as_its_loss(public, label):  # noqa: F811
    """The host does not read the labels: a launch would wait for all those before it."""
    x, labels = normal(3, 70).astype(np.float32), np.array([0, label, 5])
    losses, pullback = la.vjp(la.nn.cross_entropy, public.bring(x), public.bring(labels), reduction="none")
    assert np.isnan(public.see(losses)).tolist() == [False, True, False]
    dx = public.see(pullback(public.bring(np.ones(3, np.float32))).x)
    assert np.isnan(dx).all(axis=1).tolist() == [False, True, False]
    assert not np.isnan(dx[[0, 2]]).any()


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("shape", [(2, 70, 128), (1, 133, 40), (3, 1, 256)], ids=str)
def test_convolutions_in_several_segments(public, shape, dtype):  # noqa: F811
    D = shape[-1]
    arrays = {"x": normal(*shape).astype(dtype), "weight": normal(D, 4).astype(np.float32), "bias": normal(D)}
    arrays["bias"] = arrays["bias"].astype(dtype)
    compare(public, "short_conv", arrays, activation="silu", residual=True)


@pytest.mark.parametrize("fn", ["rms_norm", "layer_norm", "gated_norm"])
@pytest.mark.parametrize("D", [1024, 4096])
def test_blocks_of_several_wide_rows(public, monkeypatch, fn, D):  # noqa: F811
    """A block loads the next row while it computes one, and adds up the gradients of parameters."""
    monkeypatch.setattr(norms, "WIDE", 2 * (D // 16))  # two blocks
    arrays = {"x": normal(7, D).astype(BFLOAT16), "weight": normal(D).astype(BFLOAT16)}
    if fn == "gated_norm":
        arrays |= {"gate": normal(D, 7).T.copy().astype(BFLOAT16)}
    else:
        arrays |= {"bias": normal(1, D)[0].astype(np.float32)}
    compare(public, fn, arrays)
    if fn == "gated_norm":
        compare(public, fn, arrays, gate_first=True)


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize(("V", "count", "D"), [(300, 5001, 24), (70000, 2048, 7), (5, 700, 8), (3, 1, 16)], ids=str)
def test_gradients_of_a_table_add_up_in_a_fixed_order(public, dtype, V, count, D):  # noqa: F811
    """Runs of one id within a block of rows and over several, in one pass of the sort and in three."""
    rng = np.random.default_rng(V)
    ids = np.minimum(rng.zipf(1.3, count), V) - 1
    weight, dy = normal(V, D).astype(dtype), normal(count, D).astype(dtype)
    found = []
    for _ in range(2):
        y, pullback = la.vjp(la.nn.embedding, public.bring(ids), public.bring(weight))
        assert public.see(y).tobytes() == weight[ids].tobytes()
        found.append(public.see(pullback(public.bring(dy)).weight))
    assert found[0].tobytes() == found[1].tobytes()
    exact, sizes = np.zeros((V, D)), np.zeros((V, D))
    np.add.at(exact, ids, dy.astype(np.float64))
    np.add.at(sizes, ids, np.abs(dy.astype(np.float64)))
    near(found[0], exact, exact, dtype, 0.0 * sizes if dtype.itemsize == 2 else 0.1 * sizes)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ids_outside_of_a_table_have_no_row_and_no_gradient(public, kind):  # noqa: F811
    ids, weight = np.array([[2, -1, 0], [4, 2, 9]], kind), normal(4, 8).astype(np.float32)
    y, pullback = la.vjp(la.nn.embedding, public.bring(ids), public.bring(weight))
    assert np.isnan(public.see(y)).all(axis=-1).tolist() == [[False, True, False], [True, False, True]]
    d = public.see(pullback(public.bring(np.ones((2, 3, 8), np.float32))).weight)
    assert d[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize(("size", "first"), [(1, 0), (4100, 0), (4101, 1), (40003, 0)])
def test_a_mask_is_that_of_numpy(public, size, first, dtype):  # noqa: F811
    """In one piece and several of a thread, aligned or not; the same in the gradient."""
    x = normal(size).astype(dtype)
    here = public.bring(x)[first:]
    y, pullback = la.vjp(la.nn.dropout, here, rng=11, p=0.3)
    expected = la.nn.dropout(x[first:], rng=11, p=0.3, backend="reference")
    assert public.see(y).tobytes() == expected.tobytes()
    assert public.see(pullback(here).x).tobytes() == expected.tobytes()


def test_a_token_shift_moves_numbers(public):  # noqa: F811
    """Also NaN and inf, which stay where they belong."""
    x = normal(2, 9, 40).astype(np.float16)
    x[0, 3, :3] = np.nan, np.inf, -np.inf
    y = public.see(la.nn.token_shift(public.bring(x)))
    np.testing.assert_array_equal(y[:, 1:], x[:, :-1])
    assert not y[:, 0].any()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("T", [1, 2, 6])
@pytest.mark.parametrize("fn", ["short_conv", "token_shift", "mix"])
def test_states_in_the_rows_of_a_pool_are_overwritten_where_they_lie(public, fn, T, kind):  # noqa: F811
    """One launch of one token, two of several; a row outside of the pool is neither read nor written."""
    x, pool = normal(4, T, 24).astype(np.float16), normal(6, 5, 24).astype(np.float32)
    rows, owned = np.array([3, -1, 0, 5], kind), np.array([3, 0, 5])
    options = {"mix": {"mix": normal(24).astype(np.float16)}, "token_shift": {}}.get(
        fn, {"weight": normal(24, 4).astype(np.float16), "activation": "silu"})  # fmt: skip
    call = getattr(la.nn, "short_conv" if fn == "short_conv" else "token_shift")
    begin = np.where((rows >= 0)[:, None, None], pool[rows], 0)
    expected, end = call(x, **options, state=begin, return_state=True, backend="reference")
    there = {n: public.bring(y) if hasattr(y, "shape") else y for n, y in options.items()}
    here, at = public.bring(pool), public.bring(rows)
    near(public.see(call(public.bring(x), **there, state=here, state_rows=at)), expected, expected, x.dtype, 4.0)
    y, found = call(public.bring(x), **there, state=here, state_rows=at, return_state=True)
    assert public.see(found).tobytes() == end.tobytes()
    assert public.see(here).tobytes() == pool.tobytes()
    if public.launched is not None:
        public.launched.clear()
    y, found = call(public.bring(x), **there, state=here, state_rows=at, overwrite_state=True, return_state=True)
    assert found is here
    near(public.see(y), expected, expected, x.dtype, 4.0)
    assert public.see(here)[owned].tobytes() == end[rows >= 0].tobytes()
    assert public.see(here)[[1, 2, 4]].tobytes() == pool[[1, 2, 4]].tobytes()
    if public.launched is not None:
        assert [entry for _, entry, *_ in public.launched] == (["conv_step"] if T == 1 else ["conv", "conv_end"])


CAPTURED = [c for c in KERNELS if c.label not in ("long",)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CAPTURED, ids=lambda c: f"{c.name} {c.label}".strip())
def test_a_piece_is_captured_in_a_graph(case):
    """Forward and backward; products of BLAS are not, since CuPy refuses to capture them."""
    cp = pytest.importorskip("cupy")
    given = {n: cp.asarray(x) for n, x in (case.arrays | dict(case.whole)).items()}
    result, pullback = case.vjp(given)
    d = [cp.asarray(normal(*y.shape).astype(y.dtype)) for y in parts(result)]
    expected = [*parts(result), *parts(list(pullback(*d)))]
    pool, held, stream = cp.get_default_memory_pool(), [], cp.cuda.Stream(non_blocking=True)

    def hold(size):
        held.append(pool.malloc(size))
        return held[-1]

    cp.cuda.Device().synchronize()
    with stream, cp.cuda.using_allocator(hold):
        stream.begin_capture()
        result, pullback = case.vjp(given)
        found = [*parts(result), *parts(list(pullback(*d)))]
        graph = stream.end_capture()
    for y in found:
        y[...] = cp.nan
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    for y, wanted in zip(found, expected, strict=True):
        assert cp.asnumpy(y).tobytes() == cp.asnumpy(wanted).tobytes()


def test_arrays_that_lie_apart(public):  # noqa: F811
    """Parts of a fused projection are read where they are."""
    whole = normal(2, 9, 6, 64).astype(np.float32)
    here, weight = public.bring(whole), normal(64).astype(np.float32)
    y, pullback = la.vjp(la.nn.rms_norm, here[:, :, 2:4], public.bring(weight))
    exact, exact_pullback = la.vjp(la.nn.rms_norm, whole[:, :, 2:4].astype(np.float64), weight.astype(np.float64))
    near(public.see(y), exact, exact, weight.dtype, 1.0)
    d = pullback(here[:, :, 1:3])
    exact_d = exact_pullback(whole[:, :, 1:3].astype(np.float64))
    near(public.see(d.x), exact_d.x, exact_d.x, weight.dtype, 4.0)
    near(public.see(d.weight), exact_d.weight, exact_d.weight, weight.dtype, 32.0)
    flat, taps = here.reshape(2, 9, 384), normal(64, 4).astype(np.float32)
    y = public.see(la.nn.short_conv(flat[..., 64:128], public.bring(taps)))
    exact = la.nn.short_conv(whole.reshape(2, 9, 384)[..., 64:128].astype(np.float64), taps.astype(np.float64))
    near(y, exact, exact, weight.dtype, 4.0)
    y = public.see(la.nn.rotary(here[:, :, 2:4]))
    exact = la.nn.rotary(whole[:, :, 2:4].astype(np.float64))
    near(y, exact, exact, weight.dtype, 4.0)
    if public.launched is not None:
        assert not any(file == "ops/formula.cu" for file, *_ in public.launched), "copies"


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e25])
def test_no_row_overflows(public, size):  # noqa: F811
    x = (normal(3, 128) * size).astype(np.float32)
    for fn in (la.nn.l2_norm, la.nn.rms_norm):
        found, exact = public.see(fn(public.bring(x), eps=0.0)), fn(x.astype(np.float64), eps=0.0)
        near(found, exact, exact, x.dtype, 1.0)
    assert not public.see(la.nn.rms_norm(public.bring(0 * x), eps=0.0)).any()


def relative(found, exact):
    return np.linalg.norm(np.asarray(found).astype(np.float64) - exact) / max(np.linalg.norm(exact), 1e-300)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize(("shape", "M"), [((1, 40), 24), ((257, 40), 24), ((2, 130, 8), 2), ((0, 8), 3), ((5, 8), 0)])
def test_dense_layers(public, shape, M, dtype, biased):  # noqa: F811
    """Rows of any number; a row has the bits that it has alone."""
    x, W = normal(*shape).astype(dtype), normal(shape[-1], M).astype(dtype)
    given = [x, W, normal(M).astype(dtype)] if biased else [x, W]
    y, pull = la.vjp(la.nn.linear, *map(public.bring, given))
    dy = normal(*shape[:-1], M).astype(dtype)
    d = pull(public.bring(dy))
    exact, pull_exact = la.vjp(la.nn.linear, *(a.astype(np.float64) for a in given))
    few = 4 * float(ml_dtypes.finfo(dtype).eps)
    assert y.dtype == dtype
    assert relative(public.see(y), exact) <= few
    for name, right in pull_exact(dy.astype(np.float64))._asdict().items():
        if right is not None:
            found = public.see(getattr(d, name))
            assert found.shape == right.shape
            assert relative(found, right) <= few, name
    if len(x) and M:
        alone = public.see(la.nn.linear(public.bring(x[-1:]), *map(public.bring, given[1:])))
        assert alone.tobytes() == public.see(y)[-1:].tobytes()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_losses_of_hidden_states(public, monkeypatch, dtype, biased, reduction, few):  # noqa: F811
    """Logits at once (few), and part by part; gradients of logits are rounded to 16 bits where the arrays are."""
    N, D, V = 300, 16, 24
    if not few:
        for name in ("NUMBERS", "NUMBERS_ON_DEVICE", "WIDTHS"):
            monkeypatch.setattr(ends, name, 0)
    labels = np.where(np.arange(N) % 7, np.arange(N) % V, -100)
    given = {"x": normal(N, D).astype(dtype), "weight": (normal(D, V) / 4).astype(dtype)}
    given |= {"bias": normal(V).astype(dtype)} if biased else {}
    d = normal(*((N,) if reduction == "none" else ())).astype(np.float64 if dtype == np.float64 else np.float32)
    wide = lambda y: y.astype(np.float64)  # noqa: E731
    own, exactly = ({n: f(y) for n, y in given.items()} for f in (public.bring, wide))
    loss, pull = la.vjp(la.nn.cross_entropy, **own, labels=public.bring(labels), reduction=reduction)
    exact, pull_exact = la.vjp(la.nn.cross_entropy, **exactly, labels=labels, reduction=reduction)
    found, right = pull(public.bring(d)), pull_exact(wide(d))
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert relative(public.see(loss), exact) <= 4 * min(eps, float(np.finfo(np.float32).eps))
    for name in given:
        assert relative(public.see(getattr(found, name)), getattr(right, name)) <= 4 * eps, name
