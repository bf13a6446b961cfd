"""On a GPU the output and the state have the same bits whether a backward follows or not."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.softmax import policy as softmax_policy
from tests.cases import cases_of, draw, in_dtype, parts, parts_like

pytestmark = pytest.mark.gpu
CASES = [case for fn in la.VARIANTS for case in cases_of(fn)]
FIRST = [cases_of(fn)[0] for fn in la.VARIANTS]
SHAPES = [(1, 64), (17, 64), (130, 32), (64, 128)]  # tokens, channels of keys and values


@pytest.fixture(autouse=True)
def same_bits(monkeypatch):
    """With the option for what differs by default."""
    monkeypatch.setattr(la.config, "training_bits", True)


def bits(x):
    """Every array of a result, as bytes."""
    return [y.get().tobytes() for y in parts(x)]


def check(case, dtype, T, K, *, with_state=True, **options):
    """The first call and a replayed one, with gradients and without."""
    cupy, kind = pytest.importorskip("cupy"), pytest.importorskip("ml_dtypes").bfloat16
    kind = kind if dtype == "bfloat16" else np.dtype(dtype)
    arrays, state = draw(case, T=T, H=2, K=K, V=K)
    there = {n: cupy.asarray(in_dtype(x, kind)) if isinstance(x, np.ndarray) else x for n, x in arrays.items()}
    if with_state:
        there["state"] = parts_like(state, [cupy.asarray(in_dtype(S, np.float32)) for S in parts(state)])
    options |= case.options | {"return_state": True}
    expected = bits(case.fn(**there, **options))
    for _ in range(2):
        result, pullback = la.vjp(case.fn, **there, **options)
        pullback(result[0])
        assert bits(result) == expected
        assert bits(case.fn(**there, **options)) == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("T", "K"), SHAPES)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_the_output_does_not_depend_on_a_backward(case, dtype, T, K):
    check(case, dtype, T, K)
    check(case, dtype, T, K, with_state=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nor_do_those_of_every_option(case, dtype):
    check(case, dtype, 17, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("T", "K", "at"), [(130, 64, [64, 130]), (130, 64, [50]), (1100, 64, [64]), (130, 136, [64])])
@pytest.mark.parametrize("case", [case for case in FIRST if not case.spec.grows], ids=str)
def test_nor_do_those_with_states_at_positions(case, dtype, T, K, at):
    """At ends of chunks and inside; cut into segments; too wide for one pass of gradients."""
    check(case, dtype, T, K, return_states_at=at)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in FIRST if case.spec.grows], ids=str)
def test_nor_do_those_with_caches_at_positions(case, dtype):
    check(case, dtype, 130, 64, return_states_at=[64, 130])


def test_nor_do_those_of_attention_whose_gradients_no_kernel_computes(monkeypatch):
    monkeypatch.setattr(softmax_policy, "LONGEST_STICK", 100)
    for case in cases_of(la.stick_breaking_attention):
        check(case, "bfloat16", 130, 64, with_state=False)
