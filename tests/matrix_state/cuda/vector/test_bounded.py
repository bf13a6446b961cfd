"""Gates with a declared lower bound in the CUDA kernels, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.device_arrays import error, same
from tests.matrix_state.cuda.vector.test_kernels import OUT, draw, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
DECLARED = {"gate_lower_bound": -1.0}


def gated(kind, gate="bfloat16", seed=0, **how):
    """Gates of 0 to -1; all -1, which is 64 nats in a chunk; channels of 0, -1e-3 and -1; mild ones."""
    arrays, state = draw(kind="mild", gate=gate, seed=seed, **how)
    g, rng = arrays["g"], np.random.default_rng(seed)
    if kind == "drawn":
        g[...] = -rng.uniform(0, 1, g.shape)
    if kind == "least":
        g[...] = -1
    if kind == "channels":
        g[...] = rng.choice([0.0, -1e-3, -1.0], g.shape[-2:])
    return arrays, state


def check(cp, arrays, state, **options):
    out, end = run(cp, la.gla, arrays, state, **DECLARED, **options)
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    expected, last = la.gla(**wide, state=state.astype(np.float64), return_state=True, **options)
    assert error(out, expected) < OUT
    assert error(end, last) < OUT


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mild", "drawn", "least", "channels"])
def test_gates(cp, kind, gate):
    check(cp, *gated(kind, gate, T=330))
    check(cp, *gated(kind, gate, T=130, K=64, V=40, heads=(2, 2, 4)))


@pytest.mark.parametrize("T", [1, 17, 64, 65, 257])
def test_lengths(cp, T):
    check(cp, *gated("drawn", T=T, seed=T))


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_ragged_and_segments(cp, gate):
    check(cp, *gated("drawn", gate, B=1, T=301, N=6), cu_seqlens=[0, 5, 5, 70, 97, 300, 301])
    assert vector_plan.segments(3, 27, launch.multiprocessors()) > 1
    check(cp, *gated("mild", gate, B=1, T=1700))


@pytest.mark.parametrize("kind", ["mixed", "resets", "twenty"])
def test_a_wrong_declaration_is_found(cp, kind):
    """Where a chunk decays by more than it says, its segment is redone."""
    check(cp, *draw(kind=kind, T=330))
    check(cp, *draw(kind=kind, B=1, T=1700))
    late, state = gated("mild", T=700)
    late["g"][1, 650, 2, 7] = -np.inf
    check(cp, late, state)


def test_later_tokens_change_no_bit(cp):
    first, state = gated("drawn", B=1, T=400)
    second, _ = gated("least", B=1, T=400, seed=1)
    whole, _ = run(cp, la.gla, first, state, **DECLARED)
    for at in (192, 200, 231):
        changed = {n: np.concatenate([x[:, :at], second[n][:, at:]], axis=1) for n, x in first.items()}
        out, _ = run(cp, la.gla, changed, state, **DECLARED)
        assert same(out[:, :at], whole[:, :at])
        assert not same(out[:, at:], whole[:, at:])


def test_same_bits_alone_batched_ragged_and_again(cp):
    arrays, state = gated("drawn", B=3, T=200)
    out, end = run(cp, la.gla, arrays, state, **DECLARED)
    for _ in range(5):
        assert same(run(cp, la.gla, arrays, state, **DECLARED)[0], out)
    one, last = run(cp, la.gla, {n: x[1:2] for n, x in arrays.items()}, state[1:2], **DECLARED)
    assert same(one, out[1:2])
    assert same(last, end[1:2])
    packed = {n: x.reshape(1, -1, *x.shape[2:]) for n, x in arrays.items()}
    found, last = run(cp, la.gla, packed, state, cu_seqlens=[0, 200, 400, 600], **DECLARED)
    assert same(found.reshape(out.shape), out)
    assert same(last, end)


@pytest.mark.parametrize("T", [200, 1100])
def test_gradients_and_states_at_positions(cp, T):
    arrays, state = gated("drawn" if T == 200 else "mild", B=1, T=T)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(arrays["v"].shape).astype(arrays["v"].dtype)
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    (out, _, at), pull = la.vjp(
        la.gla,
        **there,
        state=cp.asarray(state),
        backend="cuda",
        return_state=True,
        return_states_at=[64, 128],
        **DECLARED,
    )
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    (right, _, states), expected = la.vjp(
        la.gla, **wide, state=state.astype(np.float64), return_state=True, return_states_at=[64, 128]
    )
    assert error(out, right) < OUT
    assert error(at, states) < OUT
    grads = pull(cp.asarray(dout))
    for name, want in expected(dout.astype(np.float64))._asdict().items():
        if want is not None:
            assert error(getattr(grads, name), want) < 6e-3, name
