"""AdamW and Muon on dicts: their equations, groups, torch's results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.ops.cpu.optimisers import EACH
from linattn_np.ops.optimisers import COEFFICIENTS, norm, orthogonal

SHAPES = {"a": (5, 3), "gain": (7,), "b": (EACH + 9, 2), "empty": (0, 4)}


def arrays(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shape).astype(dtype) for n, shape in SHAPES.items()}


def naive(p, gradients, rate, a, b, eps, decay):
    m = v = 0
    for t, g in enumerate(gradients, 1):
        m, v = a * m + (1 - a) * g, b * v + (1 - b) * g**2
        p = p - rate * decay * p - rate * (m / (1 - a**t)) / (np.sqrt(v / (1 - b**t)) + eps)
    return p


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_adamw_is_its_equation_and_gains_do_not_decay(dtype, error):
    optimiser = la.train.AdamW(decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    start, steps = arrays(0, dtype), [arrays(n, dtype) for n in (1, 2, 3)]
    P, moments = optimiser.start(start)
    assert list(P.arrays) == ["a", "b", "empty", "gain"]
    for t, grads in enumerate(steps, 1):
        G = P.zeros()
        G.set(grads)
        optimiser.update(P, G, moments, t, 0.05, clip=0.5)
    for n, x in P.arrays.items():
        each = [0.5 * g[n].astype(np.float64) for g in steps]
        expected = naive(start[n].astype(np.float64), each, 0.05, 0.8, 0.9, 1e-6, 0.0 if n == "gain" else 0.3)
        assert np.allclose(x, expected, rtol=error, atol=error), n


def test_the_array_form_equals_the_loops():
    xp = pytest.importorskip("array_api_strict")
    from linattn_np.ops.optimisers import adamw

    each = [np.random.default_rng(n).random(3 * EACH + 5) for n in range(4)]
    groups = [(0, EACH + 1, 0.9, 0.1), (EACH + 1, 3 * EACH + 5, 1.0, 0.2)]
    other = [xp.asarray(x) for x in each]
    ours = [x.copy() for x in each]
    adamw(np, *ours, groups, (0.9, 0.99), 1e-8, 3, 0.7)
    adamw(xp, *other, groups, (0.9, 0.99), 1e-8, 3, 0.7)
    for x, y in zip(ours, other, strict=True):
        assert np.allclose(x, np.asarray(y), rtol=1e-14)
    assert np.isclose(norm(np, ours[0]), np.linalg.norm(ours[0]), rtol=1e-14)
    assert norm(np, ours[0]) == norm(np, ours[0].copy())


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(9, 16), (16, 9)])
def test_muon_brings_singular_values_near_one(name, shape):
    U, _, V = np.linalg.svd(np.random.default_rng(0).standard_normal(shape), full_matrices=False)
    G = U * np.linspace(0.3, 4, 9) @ V
    X = orthogonal(G, name)
    S = U.T @ X @ V.T
    assert np.allclose(S, np.diag(np.diag(S)), atol=1e-12)
    assert 0.65 < np.diag(S).min() < np.diag(S).max() < 1.25


def test_muon_turns_hidden_matrices_alone():
    shapes = {"embedding/weight": (20, 8), "blocks/q/weight": (8, 12), "blocks/gain": (8,), "blocks/small": (8, 2)}
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(s) for n, s in shapes.items()}
    muon = la.train.Muon(decay=0.0, others=la.train.AdamW(decay=0.0))
    P, moments = muon.start(params)
    G = P.zeros()
    G.set({n: rng.standard_normal(s) for n, s in shapes.items()})
    muon.update(P, G, moments, 1, 0.01)
    assert moments["v"].arrays.keys() == shapes.keys() - {"blocks/q/weight"}
    for n, x in params.items():
        change = (x - P.arrays[n]) / 0.01
        if n == "blocks/q/weight":
            assert np.allclose(change, 10 * 1.5**0.5 * orthogonal(G.arrays[n] * (1 - 0.95**2), "keller"), rtol=1e-4)
        else:  # the first step of Adam is the sign
            assert np.allclose(change, np.sign(G.arrays[n]), rtol=1e-4), n
    with pytest.raises(ValueError, match="Muon: coefficients is 'other', expected"):
        la.train.Muon(coefficients="other").start(params)


def test_steps_are_those_of_torch():
    torch = pytest.importorskip("torch")
    start, steps = arrays(0, np.float32), [arrays(n, np.float32) for n in range(1, 6)]
    optimiser = la.train.AdamW(decay=0.2, decays=lambda path, shape: True)
    P, moments = optimiser.start(start)
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in start.items()}
    theirs = torch.optim.AdamW(tensors.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    for t, grads in enumerate(steps, 1):
        G = P.zeros()
        G.set(grads)
        optimiser.update(P, G, moments, t, 0.01)
        for n, x in tensors.items():
            x.grad = torch.tensor(grads[n])
        theirs.step()
    for n, x in P.arrays.items():
        assert np.allclose(x, tensors[n].detach().numpy(), rtol=0, atol=1e-6), n


def test_flat_arrays_have_one_dtype():
    with pytest.raises(ValueError, match="Flat: arrays is empty"):
        la.train.Flat.of({})
    with pytest.raises(TypeError, match="Flat: the arrays have the dtypes float32, float64, expected one"):
        la.train.Flat.of({"a": np.zeros(2), "b": np.zeros(2, np.float32)})


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("optimiser", [la.train.AdamW(), la.train.Muon()], ids=["adamw", "muon"])
def test_masters_step_as_float32_parameters_do(optimiser, kind):
    """The parameters are the numbers in 16 bits nearest to those that float32 parameters would be."""
    rng = np.random.default_rng(0)
    start = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"w": (9, 12), "gain": (7,)}.items()}
    (wide, wide_moments), (P, moments) = optimiser.start(start), optimiser.start(start, kind)
    assert {x.vector.dtype for x in moments.values()} == {np.dtype(np.float32)}
    for t in range(1, 4):
        G = P.zeros()
        G.vector[...] = rng.standard_normal(G.vector.size)
        optimiser.update(P, G, moments, t, 0.01, clip=0.5)
        optimiser.update(wide, G.cast(np.float32), wide_moments, t, 0.01, clip=0.5)
        assert moments["master"].vector.tobytes() == wide.vector.tobytes()
        assert P.vector.dtype == kind
        assert P.vector.tobytes() == wide.vector.astype(kind).tobytes()
    assert set(optimiser.start(P.arrays)[1]) == {"m", "v", "master"}  # of a file
