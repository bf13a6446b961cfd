"""The chunk kernels inside a CUDA graph: captured once, replayed on other numbers in the same memory."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import recorded_plans

from .device_arrays import same

pytestmark = pytest.mark.gpu
SHAPES = {"one piece": (2, 300, 4), "segments": (1, 2100, 2)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backward", [False, True])
def test_replays_are_calls(dtype, shape, backward):
    cp = pytest.importorskip("cupy")
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float32
    B, T, H = SHAPES[shape]

    def draw(seed):
        rng = np.random.default_rng(seed)
        q, k, v, dout = (cp.asarray(rng.standard_normal((B, T, H, 64)).astype(kind)) for _ in range(4))
        g = cp.asarray(-rng.uniform(0, 0.1, (B, T, H)).astype(np.float32))
        state = cp.asarray(rng.standard_normal((B, H, 64, 64)).astype(np.float32))
        return [q, k, v, g, state, dout]

    def call(q, k, v, g, state, dout):
        if not backward:
            return list(la.simple_gla(q, k, v, g, state=state, return_state=True, backend="cuda"))
        result, pullback = la.vjp(la.simple_gla, q, k, v, g, state=state, return_state=True, backend="cuda")
        return [*result, *pullback(dout)]

    buffer, sets = draw(0), [draw(1), draw(2)]
    expected = [call(*one) for one in sets]
    call(*buffer)
    stream, pool, held = cp.cuda.Stream(non_blocking=True), cp.get_default_memory_pool(), []

    def hold(size):
        held.append(pool.malloc(size))
        return held[-1]

    cp.cuda.Device().synchronize()
    with stream:
        with cp.cuda.using_allocator(hold):
            stream.begin_capture()
            found = call(*buffer)
            graph = stream.end_capture()
        pool.free_all_blocks()  # what nobody holds is the driver's, or somebody else's
        others = [cp.full(1 << n, np.nan, np.float32) for n in range(8, 22)]
        for one, right in zip(sets, expected, strict=True):
            for mine, theirs in zip(buffer, one, strict=True):
                mine[...] = theirs
            graph.launch(stream)
            stream.synchronize()
            for a, b in zip(found, right, strict=True):
                assert same(a, b)
            assert all(bool(cp.isnan(x).all()) for x in others)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_calls_made_again(monkeypatch, shape, overwrite):
    """The second call of a kind launches what the first did, on its own arrays and into new ones full of NaN."""
    cp = pytest.importorskip("cupy")
    B, T, H = SHAPES[shape]
    monkeypatch.setattr(
        launch,
        "array_type",
        lambda: (
            lambda shape, dtype, *memory: cp.ndarray(shape, dtype, *memory) if memory else cp.full(shape, np.nan, dtype)
        ),
    )
    monkeypatch.setattr(replay, "by_key", {})
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, k, v = (cp.asarray(rng.standard_normal((B, T, H, 64)).astype(np.float32)) for _ in range(3))
        g = cp.asarray(-rng.uniform(0, 0.1, (B, T, H)).astype(np.float32))
        state = cp.asarray(rng.standard_normal((B, H, 64, 64)).astype(np.float32))
        # without a pullback never replayed
        right, _ = la.vjp(la.simple_gla, q, k, v, g, state=state, return_state=True, backend="cuda")
        found = la.simple_gla(q, k, v, g, state=state, return_state=True, overwrite_state=overwrite, backend="cuda")
        assert len(recorded_plans()) == 1
        for a, b in zip(found, right, strict=True):
            assert same(a, b)


def test_what_replay_asks_of_an_array_is_what_its_flags_say():
    """The attribute is not documented: it must be there, and right, in every version of CuPy."""
    cp = pytest.importorskip("cupy")
    x = cp.zeros((3, 4, 5), np.float32)
    for y in (x, x[:, ::2], x.T, x[:1], x[..., :0], x.swapaxes(0, 1), cp.zeros(()), x.astype(np.float16)):
        assert y._c_contiguous == y.flags.c_contiguous
