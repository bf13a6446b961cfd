"""The host side of the CUDA step, against a twin of its kernel that works on the bytes it is given: no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.token import calls as cuda_step
from linattn_np.matrix_state.cuda.token import plan as step_plan
from linattn_np.matrix_state.types import Decay, Erase, Inputs
from tests.core_cases import CELLS, case
from tests.matrix_state.cuda.step_twin import CUPY, device_plans, stub
from tests.matrix_state.cuda.token import host

launched, public, arrays_of, there = host.launched, host.public, host.arrays_of, host.there


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize(
    "sizes",
    [
        {"K": 8, "V": 4},
        {"K": 5, "V": 3, "heads": (1, 1, 4)},
        {"K": 130, "V": 1},
        {"heads": (4, 2, 2)},
        {"offsets": [0, 2, 2, 5], "B": 1},
    ],
)
def test_every_cell(launched, cell, sizes):
    x, plan, state, *_ = case(*cell, T=5, dtype=np.float32, C=None, **sizes)
    if cell[2] == "bonus" and sizes.get("heads") == (4, 2, 2):
        pytest.skip("a bonus has the heads of the values")
    expected, end, _ = recurrence.forward(x, plan, state)
    x2 = there(x)
    if cell[1] == "delta":
        x2 = x2._replace(r=x2.k) if np.array_equal(x.r, x.k) else x2
    out2, end2, _ = cuda_step.forward(x2, plan._replace(xp=CUPY), stub(state))
    assert np.abs(out2 - expected).max() < 1e-5
    assert np.abs(end2 - end).max() < 1e-5
    assert not np.isnan(out2).any()
    assert cuda_step.unsupported_reason(matrix_state.Call(x2, plan._replace(xp=CUPY))) is None
    assert policy.is_short_cuda(plan)


def test_one_token_has_a_kernel_of_its_own(launched):
    """Where its strides are short, rows of the state lie behind one another and a query reads a state of its own."""

    def launch_of(T=1, K=8, V=4, heads=(2, 1, 2), turn=lambda x, state: (x, state), **more):
        x, plan, state, *_ = case("scalar", "delta", "after", T, None, heads, K, V, dtype=np.float32, **more)
        expected, end, _ = recurrence.forward(x, plan, state)
        mine, start = turn(there(x), stub(state))
        out, last, _ = cuda_step.forward(mine, plan._replace(xp=CUPY), start)
        assert np.abs(out - expected).max() < 1e-5
        assert np.abs(last - end).max() < 1e-5
        return dict(launched[-1][0])["LA_ONE"]

    def apart(x, state):  # rows of a state that others lie between
        buffer = stub(np.zeros((*state.shape[:-1], 8), np.float32))
        buffer[..., :4] = state
        return x, buffer[..., :4]

    def far(x, state):  # a batch of one in a long way from the next
        far = np.lib.stride_tricks.as_strided(x.v, strides=(1 << 31, *x.v.strides[1:]), subok=True)
        return x._replace(v=far), state

    assert launch_of() == 1
    assert launch_of(K=200, V=64) == launch_of(K=4, V=132) == 1
    assert launch_of(T=2) == launch_of(K=7) == launch_of(heads=(4, 2, 2)) == launch_of(B=1, offsets=[0, 1]) == 0
    assert launch_of(turn=apart) == launch_of(B=1, turn=far) == 0


@pytest.mark.parametrize("erase", [Erase.DELTA, Erase.FREE])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("dtype", "state"), [("bfloat16", "float32"), ("float32", "float32"), ("float16", "bfloat16")])
@pytest.mark.parametrize("K", [4, 16, 36, 64, 100, 128, 132, 256])
@pytest.mark.parametrize("V", [4, 20, 32, 64, 72, 128, 256])
def test_the_warps_of_one_token_hold_a_state(K, V, dtype, state, many, erase):
    """All rows once, no lane without rows but for the last power of two, as many sums as there are leaves."""
    kind = step_plan.StepKind(K, V, Decay.VECTOR, False, erase, False, False, 1, False)
    d = dict(step_plan.step_constants(kind, step_plan.Stored(dtype, True, True, state, state, many)))
    rows = many and state != "float32" and erase is not Erase.FREE
    assert (d["LA_LANES"] == 32) == (rows and V >= 128 and K in (100, 128))
    groups = 32 * d["LA_SPLIT"] // d["LA_LANES"]
    assert groups <= policy.SUM_CHAINS
    assert policy.SUM_CHAINS % groups == d["LA_WARPS"] % d["LA_SPLIT"] == 0
    assert groups == 1 or groups == 32 // d["LA_LANES"] or 4 * groups < 2 * K
    assert d["LA_WARPS"] * d["LA_BLOCKS"] <= 48
    assert d["LA_WARPS"] // d["LA_SPLIT"] <= -(-V // (d["LA_LANES"] * d["LA_PER"]))


def test_sixteen_bits_and_other_gates(launched):
    x, plan, state, *_ = case("scalar", "delta", "after", T=3, K=8, V=4, dtype=np.float32, C=None)
    half = Inputs(
        *(
            None if y is None else y.astype(ml_dtypes.bfloat16) if n in ("q", "k", "v", "r", "beta") else y
            for n, y in x._asdict().items()
        )
    )
    wide = Inputs(*(None if y is None else y.astype(np.float32) for y in half))
    expected, _, _ = recurrence.forward(wide, plan, state)
    out, end, _ = cuda_step.forward(there(half), plan._replace(xp=CUPY), stub(state))
    assert out.dtype == ml_dtypes.bfloat16
    assert end.dtype == np.float32
    assert np.abs(out.astype(np.float32) - expected).max() < 2.0**-7 * np.abs(expected).max()


def test_long_calls_and_gradients(public):
    arrays = arrays_of(la.kda, T=30)
    mine = {n: stub(x) for n, x in arrays.items()}
    assert la.explain(la.kda, **{n: x[:, :16] for n, x in mine.items()}).backend == "cuda"
    assert la.explain(la.kda, **mine).backend == "cuda"  # token by token: no chunk kernel has these widths
    assert la.explain(la.kda, **mine, chunk_size=32).backend == "chunks"
    assert la.explain(la.kda, **mine, chunk_size=1).backend == "cuda"
    few = {n: x[:, :5] for n, x in arrays.items()}
    out, pull = la.vjp(la.kda, **{n: stub(x) for n, x in few.items()})
    expected, pull2 = la.vjp(la.kda, **few)
    assert np.abs(out - expected).max() < 1e-5
    for a, b in zip(pull(stub(expected)), pull2(expected), strict=True):
        assert a is b is None or np.abs(a - b).max() < 1e-5


@pytest.mark.parametrize("how", ["apart", "in place", "pool", "turned rows"])
@pytest.mark.parametrize(("kind", "number"), [(np.dtype(ml_dtypes.bfloat16), 0), (np.dtype(np.float16), 1)], ids=str)
def test_states_in_16_bits(public, kind, number, how):
    """Read and written as they are stored: the numbers of a float32 state, rounded once where it is overwritten."""
    fn, rng = la.gated_delta_rule, np.random.default_rng(5)
    for seed in range(3):
        arrays = {n: stub(x) for n, x in arrays_of(fn, seed=seed).items()}
        state = rng.standard_normal((2, 4, 8, 4)).astype(kind)
        expected, end = fn(**arrays, state=stub(state.astype(np.float32)), return_state=True)
        S, options, kept = stub(state), {"return_state": True}, len(device_plans())
        if how == "pool":
            S = stub(np.concatenate([state, state + 1, state[::-1]])[[3, 0, 2, 1, 4, 5]].astype(kind))
            options |= {"state_rows": stub(np.array([1, 3]))}
        if how == "turned rows":  # copied, and written back
            S = stub(np.ascontiguousarray(np.swapaxes(state, -1, -2))).swapaxes(-1, -2)
        before = np.asarray(S).copy()
        out, last = fn(**arrays, state=S, **options, overwrite_state=how != "apart")
        constants = dict(public[-1][0])
        assert np.array_equal(out, expected)
        assert constants["LA_START"] == number
        if how == "apart":
            assert np.array_equal(last, end)
            assert last.dtype == np.float32
            assert np.array_equal(S, before)
        else:
            assert last is S
            assert np.array_equal(S[[1, 3]] if how == "pool" else S, np.asarray(end).astype(kind))
        if how == "pool":
            assert np.array_equal(np.asarray(S)[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
        assert constants["LA_END"] == (2 if how in ("apart", "turned rows") else number)
        if seed == 2:
            assert len(device_plans()) == kept  # replayed, but for rows that were copied
    assert len(device_plans()) == 1 + (how != "turned rows")


@pytest.mark.parametrize("T", [1, 3])
def test_alignment_of_states_in_16_bits(launched, T):
    """Four elements at a time are eight bytes, one by one where they begin elsewhere or rows are odd."""

    def wide(offset, V=8):
        x, plan, state, *_ = case("scalar", "none", "after", T, None, K=8, V=V, dtype=np.float32)
        buffer = stub(np.zeros((*state.shape[:-1], V + 8), ml_dtypes.bfloat16))
        view = buffer[..., offset : offset + V]
        view[...] = state
        expected, end, _ = recurrence.forward(x, plan, np.asarray(view).astype(np.float32))
        out, last, _ = cuda_step.forward(there(x), plan._replace(xp=CUPY, overwrite=True), view)
        assert np.abs(out - expected).max() < 1e-5
        assert last is view
        assert np.abs(view.astype(np.float32) - end).max() < 2**-7 * np.abs(end).max()
        return dict(launched[-1][0])["LA_WIDE"]

    assert wide(0) == wide(4) == 1
    assert wide(2) == wide(1) == wide(0, V=5) == 0
