"""A scan whose blocks have equal shares of all sequences and heads, also where parts are left as gates are strong."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.matrix_state.types import Erase
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.device_arrays import error, same, typed
from tests.matrix_state.cuda.vector.test_kernels import BY_READ, OUT, draw, gates, name_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
SCANS = [fn for fn in BY_READ if fn.spec.erase is Erase.NONE]
B, T = 3, 330  # six chunks, the last one cut


def many(fn, gate, strong, seed=0):
    """More sequences and heads than multiprocessors, one sequence fewer; every seventh head has strong gates."""
    H = launch.multiprocessors() // 2 - 6
    arrays, state = draw(fn, B=B, T=T, heads=(H, H, H), kind="mild", gate=gate, seed=seed)
    if strong:
        g = gates(np.random.default_rng(seed + 1), (B, T, H, 128), "mixed").astype(arrays["g"].dtype)
        arrays["g"][:, :, 3::7] = g[:, :, 3::7]
        arrays["g"][1, 200:, 5::7] = g[1, 200:, 5::7]  # from its fourth chunk on
    assert vector_plan.scan_blocks(B * H, 1, False, launch.multiprocessors()) < B * H
    assert vector_plan.scan_blocks(H, 1, False, launch.multiprocessors()) == H
    return arrays, state


def one_of(arrays, b):
    return {n: x if n == "u" else x[b : b + 1] for n, x in arrays.items()}


def there(cp, arrays):
    return {n: cp.asarray(x) for n, x in arrays.items()}


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("fn", SCANS, ids=name_of)
def test_the_same_bits_as_one_block_each(cp, fn, gate, strong):
    """Also of heads beside one that takes the exact path, of a second call, and of states at positions."""
    arrays, state = many(fn, gate, strong)
    options = {"return_state": True, "backend": "cuda", "chunk_size": 64, "return_states_at": (64, 192, T)}
    given, begins = there(cp, arrays), cp.asarray(state)
    whole = fn(**given, state=begins, **options)
    again = fn(**given, state=begins, **options)
    plain, _ = fn(**given, state=begins, return_state=True, backend="cuda", chunk_size=64)
    assert all(same(x, y) for x, y in zip(whole, again, strict=True))
    assert same(plain, whole[0])
    for b in range(B):
        alone = fn(**there(cp, one_of(arrays, b)), state=begins[b : b + 1], **options)
        for x, y in zip(whole, alone, strict=True):
            assert same(x[b : b + 1], y)


@pytest.mark.parametrize("fn", SCANS, ids=name_of)
def test_the_definition(cp, fn):
    arrays, state = many(fn, "bfloat16", True, seed=2)
    out, end = fn(**there(cp, arrays), state=cp.asarray(state), return_state=True, backend="cuda")
    for b in range(B):
        wide = {n: x.astype(np.float64) for n, x in one_of(arrays, b).items()}
        begin = state[b : b + 1].astype(np.float64)
        expected, last = fn(**wide, state=begin, return_state=True, backend="chunks")
        assert error(out[b : b + 1], expected) < OUT
        assert error(end[b : b + 1], last) < OUT


@pytest.mark.parametrize("strong", [False, True])
def test_gradients_are_those_of_one_block_each(cp, strong):
    arrays, state = many(la.gla, "bfloat16", strong)
    rng = np.random.default_rng(3)
    dout = cp.asarray(rng.standard_normal(arrays["v"].shape).astype(arrays["v"].dtype))
    _, pull = la.vjp(la.gla, **there(cp, arrays), state=cp.asarray(state), backend="cuda")
    grads = pull(dout)
    for b in range(B):
        _, alone = la.vjp(la.gla, **there(cp, one_of(arrays, b)), state=cp.asarray(state[b : b + 1]), backend="cuda")
        for name, x in alone(dout[b : b + 1])._asdict().items():
            if x is not None:
                assert same(getattr(grads, name)[b : b + 1], x), name


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("strong", [False, True])
def test_declared_bounds(cp, gate, strong):
    """One reference a chunk; where the declaration is wrong, the exact path."""
    arrays, state = many(la.gla, gate, strong)
    options = {"return_state": True, "backend": "cuda", "gate_lower_bound": -1.0}
    out, end = la.gla(**there(cp, arrays), state=cp.asarray(state), **options)
    for b in range(B):
        found, last = la.gla(**there(cp, one_of(arrays, b)), state=cp.asarray(state[b : b + 1]), **options)
        assert same(out[b : b + 1], found)
        assert same(end[b : b + 1], last)


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_declared_bounds_many_times(cp, gate):
    """Two groups take turns at chunks: neither takes a chunk for the one six before, however late copies come."""
    rng = cp.random.default_rng(0)
    rows = {n: rng.standard_normal((8, 4096, 32, 128), dtype=np.float32).astype(typed("bfloat16")) for n in "qkv"}
    g = (-0.05 * rng.random((8, 4096, 32, 128), dtype=np.float32)).astype(typed(gate))
    out = la.gla(**rows, g=g, backend="cuda", gate_lower_bound=-1.0)
    for _ in range(400):
        again = la.gla(**rows, g=g, backend="cuda", gate_lower_bound=-1.0)
        assert bool((again.view("u2") == out.view("u2")).all())


@pytest.mark.parametrize("declared", [False, True])
def test_all_strong(cp, declared):
    """Every part is left at its first chunk."""
    arrays, state = many(la.gla, "bfloat16", False)
    arrays["g"][...] = -20.0
    options = {"return_state": True, "backend": "cuda", "gate_lower_bound": -1.0 if declared else None}
    out, end = la.gla(**there(cp, arrays), state=cp.asarray(state), **options)
    given = there(cp, one_of(arrays, 1))
    found, last = la.gla(**given, state=cp.asarray(state[1:2]), **options)
    assert same(out[1:2], found)
    assert same(end[1:2], last)


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("declared", [False, True])
def test_parts_are_left_at_any_chunk(cp, declared, gate):
    """A reset in half of the heads: chunks of other parts are on their way when it is found."""
    arrays, state = many(la.gla, gate, False)
    rng = np.random.default_rng(5)
    options = {"return_state": True, "backend": "cuda", "gate_lower_bound": -1.0 if declared else None}
    for _ in range(4):
        g = arrays["g"].copy()
        for b, head in np.ndindex(B, g.shape[2]):
            if rng.random() < 0.5:
                g[b, rng.integers(T), head, rng.integers(128)] = -np.inf
        given = arrays | {"g": g}
        out, end = la.gla(**there(cp, given), state=cp.asarray(state), **options)
        assert not np.isnan(out.get().astype(np.float32)).any()
        for b in range(B):
            found, last = la.gla(**there(cp, one_of(given, b)), state=cp.asarray(state[b : b + 1]), **options)
            assert same(out[b : b + 1], found)
            assert same(end[b : b + 1], last)
