"""The host side of the backward of a vector decay, against a twin that works on the bytes it is given: no GPU."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda import shared_memory
from linattn_np.matrix_state.cuda.delta import plan as delta_plan
from linattn_np.matrix_state.cuda.vector import gradients as vector_backward
from linattn_np.matrix_state.cuda.vector import launch as vector_launch
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.runtime.cuda import launch
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.vector import gradients_twin as twin
from tests.matrix_state.cuda.vector import twin as vector_twin
from tests.matrix_state.cuda.vector.test_calls import BFLOAT16, call_of

BACKWARD = (vector_plan.REVERSE, vector_plan.GRADS, vector_plan.BONUS, vector_plan.STRENGTHS)


@pytest.fixture
def launched(monkeypatch):
    """Launches go to the twins; (entry, constants, blocks) of each."""
    found = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        found.append((entry, dict(constants), blocks))
        if entry == "head_sums":
            twin.head_sums(arguments, BFLOAT16)
            return
        own = (file, entry, threads) in BACKWARD
        assert own or (file, entry, threads) in (*vector_plan.KERNELS.values(), delta_plan.KERNELS["segments"])
        if own:
            twin.run(entry, constants, blocks, arguments, BFLOAT16)
        else:
            vector_twin.run(file, entry, constants, blocks, arguments, BFLOAT16)

    changes = {
        "launch": launch_twin,
        "prepare": lambda wanted, capability: None,
        "current_device": lambda: 0,
        "unusable": lambda: None,
        "capability": lambda: 90,
        "multiprocessors": lambda: 132,
    }
    for name, change in changes.items():
        monkeypatch.setattr(launch, name, change)
    monkeypatch.setattr(vector_launch, "tensor_map", vector_twin.tensor_map)
    for module in (vector_launch, vector_backward):
        monkeypatch.setattr(module, "moves", lambda: True)
    monkeypatch.setattr(policy, "PORTABLE", False)
    return found


def compare(launched, keep=True, dstate=True, **how):
    (x, plan), (wide, wide_plan), S = call_of(**how)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((*x.v.shape[:-2], max(x.q.shape[-2], x.v.shape[-2]), x.v.shape[-1])).astype(BFLOAT16)
    saved = recurrence.forward(wide, wide_plan, None if S is None else S.astype(np.float64))[2]
    end = cuda_calls.forward(x, plan, None if S is None else stub(S))[1]
    dend = rng.standard_normal(end.shape).astype(np.float32) if dstate else None
    expected, first = recurrence.backward(saved, dout.astype(np.float64), dend)
    if expected.r is not None:  # the keys as they read
        expected = expected._replace(k=expected.k + expected.r)
    launched.clear()
    residuals = cuda_calls.forward(x, plan._replace(gradients=bool(keep)), None if S is None else stub(S))[2]
    assert (residuals.starts is not None) == bool(keep)
    launched.clear()
    grads, d = cuda_calls.backward(residuals, stub(dout), None if dend is None else stub(dend))
    for name in ("q", "k", "v", "g", "beta", "u"):
        found, want = getattr(grads, name), getattr(expected, name)
        assert (found is None) == (want is None), name
        if found is not None:
            assert found.shape == want.shape
            assert np.abs(found.astype(np.float64) - want).max() <= np.abs(want).max() * 2**-7, name
    assert np.abs(d - first).max() <= 1e-4 * max(np.abs(first).max(), 1)
    return [(entry, constants.get("LA_EXACT", 0)) for entry, constants, _ in launched if entry != "head_sums"]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"state": False, "dstate": False},
        {"T": 65},
        {"bonus": True},
        {"gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"heads": (2, 2, 4), "bonus": True},
        {"K": 72, "V": 8, "T": 20},
        {"heads": (2, 1, 2)},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
        {"offsets": [0, 66, 70], "heads": (2, 2, 4), "B": 1},
    ],
    ids=str,
)
def test_reverse_chain_and_gradients(launched, how):
    expected = [("reverse", 0), ("grads", 0), ("grads", 1)] + [("bonus", 0)] * how.get("bonus", False)
    assert compare(launched, **how) == expected


@pytest.mark.parametrize("how", [{}, {"heads": (2, 2, 4), "T": 65}, {"K": 136, "V": 8}], ids=str)
def test_keys_of_log_decays(launched, how):
    """One kernel has both gradients of g: dg - e^g dk is stored, and no dk; a plan that does not say so gets both."""
    (x, plan), (wide, _), _ = call_of(**how)
    x = x._replace(k=stub((-np.expm1(wide.g)).astype(BFLOAT16)))
    dout = stub(np.random.default_rng(1).standard_normal(x.v.shape).astype(BFLOAT16))
    plans = [plan._replace(complement_keys=one) for one in (False, True)]
    apart, whole = (cuda_calls.backward(cuda_calls.forward(x, one, None)[2], dout, None)[0] for one in plans)
    expected = apart.g - np.exp(wide.g) * apart.k.astype(np.float64)
    assert whole.k is None
    assert np.abs(whole.g - expected).max() <= np.abs(expected).max() * 2**-8
    assert np.array_equal(whole.q, apart.q)
    assert np.array_equal(whole.v, apart.v)


@pytest.mark.parametrize("erase", [None, "delta"])
def test_a_forward_begins_to_compile_what_its_backward_launches(launched, monkeypatch, erase):
    """Compilers run beside one another: a first call then waits for the slowest kernel, not for two."""
    wanted = []
    monkeypatch.setattr(launch, "prepare", lambda kernels, capability: wanted.append(kernels))
    x, plan = call_of(**({"erase": erase} if erase else {}))[0]
    cuda_calls.forward(x, plan, None)
    assert not any("vector/backward" in file for kernels in wanted for file, _ in kernels)
    wanted.clear()
    saved = cuda_calls.forward(x, plan._replace(gradients=True), None)[2]
    before = {kernel for kernels in wanted for kernel in kernels}
    wanted.clear()
    cuda_calls.backward(saved, stub(np.zeros(x.v.shape, dtype=BFLOAT16)), None)
    assert {kernel for kernels in wanted for kernel in kernels} <= before


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"state": False, "dstate": False},
        {"T": 65, "gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"K": 72, "V": 8, "T": 20},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
        {"T": 1100, "B": 1},
    ],
    ids=str,
)
def test_delta_rule(launched, how):
    """The reverse chain of two segments is not cut."""
    assert compare(launched, erase="delta", **how) == [("reverse", 0), ("grads", 0), ("grads", 1), ("strengths", 0)]


@pytest.mark.parametrize(
    "how",
    [
        {"K": 136, "V": 8},
        {"K": 16, "V": 136},
        {"K": 136, "V": 24, "heads": (2, 2, 4), "T": 66},
        {"K": 20, "V": 12},
        {"K": 136, "V": 8, "bonus": True, "T": 30},
        {"K": 136, "V": 12, "offsets": [0, 3, 3, 70, 90], "T": 90, "B": 1},
        {"K": 20, "V": 12, "erase": "delta", "T": 30},
    ],
    ids=str,
)
def test_other_widths(launched, how):
    """Padded, and in blocks that are heads of their own."""
    compare(launched, keep="blocks", **how)


@pytest.mark.parametrize(
    "how", [{"T": 1600}, {"T": 1700, "state": False, "dstate": False, "heads": (1, 1, 2)}], ids=str
)
def test_segments_of_the_delta_rule(launched, how):
    """What segments add by the chain itself, and the transfer matrices of the forward, transposed."""
    names = [entry for entry, _ in compare(launched, erase="delta", B=1, **how)]
    assert names == ["reverse", "segments", "reverse", "grads", "grads", "strengths"]


def test_residuals_of_the_delta_rule_are_made_again(launched):
    names = [entry for entry, _ in compare(launched, keep=False, erase="delta")]
    assert names == ["inverse", "chain", "reverse", "grads", "grads", "strengths"]


def test_residuals_that_were_not_kept_are_made_again(launched, monkeypatch):
    names = compare(launched, keep=False)
    assert names == [("scan", 0), ("scan", 1), ("reverse", 0), ("grads", 0), ("grads", 1)]


def test_large_residuals_are_not_kept(launched, monkeypatch):
    (x, plan), _, S = call_of()
    monkeypatch.setattr(la.config, "cuda_saved_mib", 0)
    assert cuda_calls.forward(x, plan._replace(gradients=True), stub(S))[2].starts is None


@pytest.mark.parametrize(
    "how",
    [
        {"T": 1100},
        {"T": 1700, "offsets": [0, 3, 1100, 1100, 1700], "heads": (2, 1, 2)},
        {"T": 1537, "state": False, "heads": (1, 1, 2), "bonus": True},
    ],
    ids=str,
)
def test_segments(launched, how):
    names = [entry for entry, _ in compare(launched, B=1, **how)]
    assert names == ["reverse", "segments", "reverse", "grads", "grads"] + ["bonus"] * how.get("bonus", False)


@pytest.mark.parametrize("erase", [False, True])
def test_shared_memory_fits(erase):
    for exact in (False, True):
        resident = 1 if exact else 2
        assert resident * (shared_memory.vector_gradients(erase, exact) + 1024) <= 228 * 1024
    assert shared_memory.vector_reverse(erase) <= 227 * 1024
