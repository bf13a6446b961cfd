"""Rotations: traced ones are kernels, and that of a final state is a part of the recurrent form, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import dispatch, replay
from linattn_np.ops.rotary import inverse, rotate, rotate_rows, rotation
from linattn_np.runtime.tracing import Kernel, Trace, plain

pytest.importorskip("numba")

from linattn_np.ops.cpu.programs import Places, Views, record


def draw(K, P, V, dtype):
    rng = np.random.default_rng(K)
    x, angle = (rng.standard_normal(shape) for shape in ((2, 3, K, V), (1, P)))
    return x.astype(dtype), rotation(np, angle, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("K", "P", "V"), [(2, 1, 1), (7, 2, 5), (64, 32, 70)])
@pytest.mark.parametrize("function", [rotate, rotate_rows])
def test_a_traced_rotation_is_a_kernel_with_the_bits_of_array_calls(function, K, P, V, dtype):
    x, turn = draw(K, P, V, dtype)
    x = np.swapaxes(x, -1, -2) if function is rotate else x
    trace = Trace([x, turn])
    traced = function(np, *trace.arrays)
    assert isinstance(trace.calls[-1], Kernel)
    assert plain(traced).tobytes() == function(np, x, turn).tobytes()
    program = Views(record(trace), Places(trace), trace, [traced])
    found = program.run([3 * x, inverse(np, turn), np.empty(trace.bytes // 8)])[0]
    assert found.tobytes() == function(np, 3 * x, inverse(np, turn)).tobytes()


def test_a_final_state_is_rotated_where_it_lies():
    x, turn = draw(7, 3, 5, np.float32)
    trace, S = Trace([turn]), x[:, ::2]  # heads that do not lie side by side
    assert rotate_rows(np, trace.ended(S), trace.arrays[0]) is not S  # its rows are not evenly spaced
    trace = Trace([turn])
    end = trace.ended(x)
    assert rotate_rows(np, end, trace.arrays[0]) is end
    expected, memory = rotate_rows(np, x, turn), np.empty(trace.bytes // 8)
    Views(record(trace), Places(trace), trace, []).run([turn, memory, x])
    assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("sizes", [
    {"K": 5, "V": 40, "H": 2, "Hq": 4}, {"K": 5, "V": 140, "H": 2, "P": 1}, {"K": 16, "V": 16, "H": 2, "Hq": 1},
])  # fmt: skip
@pytest.mark.parametrize("T", [1, 3, 20])
def test_a_repeated_call_with_rotations_has_the_bits_of_a_first_one(T, sizes, overwrite, monkeypatch):
    """More queries than states, pairs beside channels that do not rotate, wide blocks of columns, chunks."""
    K, V, H, Hq, P = (sizes.get(n, sizes.get("H", 0)) for n in ("K", "V", "H", "Hq", "P"))
    rng = np.random.default_rng(0)
    shapes = {"q": (2, T, Hq, K), "k": (2, T, min(H, Hq), K), "v": (2, T, H, V), "theta": (P,)}

    def calls(count):
        drawn = np.random.default_rng(1)
        for _ in range(count):
            x = {n: drawn.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
            S = rng.standard_normal((2, H, K, V)).astype(np.float32)
            out, end = la.retnet(**x, state=S, return_state=True, overwrite_state=overwrite)
            assert (end is S) == overwrite
            yield out.tobytes(), end.tobytes()

    with monkeypatch.context() as patch:
        patch.setattr(replay, "ENABLED", False)
        expected = [*calls(3)]
    rng = np.random.default_rng(0)
    replay.clear()
    assert [*calls(3)] == expected
    (plan,) = replay.plans.values()
    assert not dispatch.is_in_part(plan)
    assert plan.plan is not replay.computed_in_full


def test_a_state_that_shares_memory_with_an_input():
    """The recorded plan leaves such a call alone, and does not rotate its state twice."""
    rng, K = np.random.default_rng(0), 4
    q, k, numbers = (rng.standard_normal(n).astype(np.float32) for n in ((1, 1, 1, K), (1, 1, 1, K), K * K))

    def call(S, v):
        return [y.tobytes() for y in la.retnet(q, k, v, state=S, return_state=True, overwrite_state=True)]

    replay.clear()
    apart = numbers.copy().reshape(1, 1, K, K), numbers[:K].copy().reshape(1, 1, 1, K)
    expected = call(*apart)
    for _ in range(2):
        call(*apart)
    assert call(numbers.reshape(1, 1, K, K), numbers[:K].reshape(1, 1, 1, K)) == expected
