"""The host side of the kernels of a vector decay, against a twin that works on the bytes it is given: no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda import calls as cuda_calls
from linattn_np.matrix_state.cuda.delta import plan as delta_plan
from linattn_np.matrix_state.cuda.vector import calls as vector
from linattn_np.matrix_state.cuda.vector import launch as vector_launch
from linattn_np.matrix_state.cuda.vector import plan as vector_plan
from linattn_np.matrix_state.types import EraseKey, ReadState
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.step_twin import Namespace, stub
from tests.matrix_state.cuda.vector import gradients_twin as twin
from tests.matrix_state.cuda.vector import twin as vector_twin

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Numbers(Namespace):
    """Integers too begin as what nobody wrote."""

    def empty(self, shape, dtype=None, **_):
        return stub(np.full(shape, np.nan if np.dtype(dtype).kind in "fV" else -1, dtype))

    def zeros(self, shape, dtype=None, **_):
        return stub(np.zeros(shape, dtype))

    def concat(self, arrays, axis=0):
        return stub(np.concatenate(arrays, axis))

    def repeat(self, x, repeats, axis=None):
        return stub(np.repeat(x, repeats, axis))


CUPY = Numbers()


@pytest.fixture
def launched(monkeypatch):
    """Launches go to the twin; (entry, constants, blocks) of each."""
    found = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        if entry == "head_sums":
            twin.head_sums(arguments, BFLOAT16)
            return
        found.append((entry, dict(constants), blocks))
        assert (file, entry, threads) in (*vector_plan.KERNELS.values(), delta_plan.KERNELS["segments"])
        vector_twin.run(file, entry, constants, blocks, arguments, BFLOAT16)

    monkeypatch.setattr(launch, "launch", launch_twin)
    monkeypatch.setattr(launch, "prepare", lambda wanted, capability: None)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(launch, "multiprocessors", lambda: 132)
    monkeypatch.setattr(vector_launch, "tensor_map", vector_twin.tensor_map)
    monkeypatch.setattr(vector_launch, "moves", lambda: True)
    monkeypatch.setattr(policy, "PORTABLE", False)
    return found


def call_of(T=70, heads=(2, 2, 2), K=16, V=8, bonus=False, erase="none", gate=np.float32, state=True, **more):
    """(x and plan as the kernels get them, the same in float64, initial state)."""
    x, plan, S, *_ = case("vector", erase, "bonus" if bonus else "after", T, 64, heads, K, V, **more)
    kinds = dict.fromkeys("qkvr", BFLOAT16) | {"g": gate, "u": np.float32, "beta": np.float32}
    rounded = x._replace(**{n: getattr(x, n).astype(kind) for n, kind in kinds.items() if getattr(x, n) is not None})
    wide = type(x)(*(None if y is None else y.astype(np.float64) for y in rounded))
    there = type(x)(*(None if y is None else stub(y) for y in rounded))
    if erase == "delta":
        wide, there = wide._replace(r=wide.k), there._replace(r=there.k)
        plan = plan._replace(erase_key=EraseKey.KEY)
    S = S.astype(np.float32) if state else None
    return (there, plan._replace(xp=CUPY, dtype=np.float32)), (wide, plan), S


def compare(launched, kept=False, **how):
    (x, plan), (wide, wide_plan), S = call_of(**how)
    assert cuda_calls.unsupported_reason(matrix_state.Call(x, plan)) is None
    expected, end, _ = recurrence.forward(wide, wide_plan, None if S is None else S.astype(np.float64))
    out, last, saved = cuda_calls.forward(x, plan, None if S is None else stub(S))
    assert out.dtype == BFLOAT16
    assert out.shape == expected.shape
    roundings = 1 + (x.k.shape[-1] > 128)  # of every block of keys, and of their sum
    assert np.abs(out.astype(np.float64) - expected).max() <= np.abs(expected).max() * 2**-8 * roundings
    assert np.abs(last - end).max() <= 1e-5 * max(np.abs(end).max(), 1)
    assert (saved.starts is None) != kept
    return launched


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"state": False},
        {"T": 1},
        {"bonus": True},
        {"gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"heads": (2, 2, 4), "bonus": True},
        {"K": 128, "V": 64, "T": 5},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
        {"offsets": [0, 66, 70], "heads": (2, 2, 4), "bonus": True, "B": 1},
    ],
    ids=str,
)
def test_one_scan_and_its_exact_form(launched, how):
    names = [(entry, constants["LA_EXACT"]) for entry, constants, _ in compare(launched, **how)]
    assert names == [("scan", 0), ("scan", 1)]
    constants = launched[0][1]
    assert constants["LA_GATE"] == (0 if how.get("gate") is BFLOAT16 else 2)
    assert constants["LA_BEFORE"] == constants["LA_BONUS"] == how.get("bonus", False)
    assert constants["LA_RAGGED"] == ("offsets" in how)


@pytest.mark.parametrize(("bound", "bonus", "taken"), [(-1.0, False, True), (-0.3, False, True), (-1.01, False, False),
                                                       (None, False, False), (-0.3, True, False)])  # fmt: skip
def test_one_reference_where_gates_are_declared_to_be_small(launched, bound, bonus, taken):
    """A scan of the other form, and the same exact one; queries that read the previous state keep theirs."""
    (x, plan), _, S = call_of(bonus=bonus)
    vector.forward(x, plan._replace(gate_lower_bound=bound), stub(S))
    assert [(c.get("LA_BOUNDED", 0), c["LA_EXACT"]) for _, c, _ in launched] == [(taken, 0), (0, 1)]
    said = cuda_calls.describe(matrix_state.Call(x, plan._replace(gate_lower_bound=bound)))
    assert ("one reference each" in said) == taken


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"state": False},
        {"T": 1},
        {"gate": BFLOAT16},
        {"heads": (4, 2, 2)},
        {"heads": (1, 1, 4)},
        {"K": 128, "V": 64, "T": 65},
        {"offsets": [0, 3, 3, 70, 200], "T": 200, "B": 1},
    ],
    ids=str,
)
def test_the_delta_rule(launched, how):
    assert [entry for entry, *_ in compare(launched, erase="delta", **how)] == ["inverse", "chain"]
    assert launched[0][1]["LA_FACTORS"] == 0


@pytest.mark.parametrize(
    "how",
    [{"T": 1100}, {"T": 1537, "state": False, "heads": (1, 1, 2)}, {"T": 1100, "K": 64, "V": 40, "heads": (2, 1, 2)}],
    ids=str,
)
def test_segments_of_the_delta_rule(launched, how):
    """Transfer matrices, multiplied by the kernel that the scalar rule has."""
    entries = [entry for entry, *_ in compare(launched, erase="delta", B=1, **how)]
    assert entries == ["inverse", "transfers", "segments", "chain"]
    assert launched[0][1]["LA_FACTORS"] == 1


@pytest.mark.parametrize(
    "how",
    [
        {"T": 1100},
        {"T": 1700, "offsets": [0, 3, 1100, 1100, 1700], "heads": (2, 1, 2)},
        {"T": 1537, "state": False, "heads": (1, 1, 2)},
    ],
    ids=str,
)
def test_segments(launched, how):
    entries = [entry for entry, *_ in compare(launched, B=1, **how)]
    assert entries == ["adds", "segments", "scan", "scan"]


@pytest.mark.parametrize(("how", "blocks"), [
    ({}, 132), ({"T": 64}, 132), ({"offsets": [0, 3, 70]}, 140), ({"heads": (66, 66, 66)}, 132),
], ids=str)  # fmt: skip
def test_equal_shares_of_more_heads_than_multiprocessors(launched, how, blocks):
    """Of sequences that are equally long; the exact form has a block each."""
    how = {"T": 70, "B": 1 if "offsets" in how else 2, "heads": (70, 70, 70), **how}
    compare(launched, K=8, **how)
    assert [n for _, _, n in launched] == [blocks, 2 * how["heads"][0]]


@pytest.mark.parametrize(("erase", "words"), [("none", "a scan of chunks"), ("delta", "chains of chunks")])
def test_the_choice_says_which_kernels(launched, erase, words):
    x, plan = call_of(erase=erase)[0]
    said = cuda_calls.describe(matrix_state.Call(x, plan))
    assert said.startswith(f"{words} by warpgroup products (wgmma), exact where")


@pytest.mark.parametrize(
    "how",
    [
        {"K": 136, "V": 8},
        {"K": 16, "V": 136},
        {"K": 136, "V": 136, "T": 20},
        {"K": 136, "V": 136, "heads": (2, 2, 4), "T": 20},
        {"K": 20, "V": 12, "heads": (2, 2, 4)},
        {"K": 300, "V": 8, "T": 20},
        {"K": 136, "V": 8, "bonus": True},
        {"K": 16, "V": 200, "erase": "delta", "heads": (1, 1, 2)},
        {"K": 20, "V": 12, "erase": "delta", "state": False},
        {"K": 136, "V": 12, "offsets": [0, 3, 3, 70, 90], "T": 90, "B": 1},
    ],
    ids=str,
)
def test_other_widths_are_padded_and_cut_into_blocks(launched, how):
    """Every pair of a block of keys and one of values is a head of its own."""
    compare(launched, kept=True, **how)
    assert max(constants["LA_K"] for _, constants, _ in launched) <= 128
    assert all(constants[n] % 8 == 0 for _, constants, _ in launched for n in ("LA_K", "LA_V"))


def test_strided_and_misaligned_arrays_are_copied(launched):
    """A decay that is the same in every token, rows at odd places: as the copy engine takes them."""
    (x, plan), (wide, wide_plan), S = call_of()
    constant = np.broadcast_to(x.g[:, :1], x.g.shape)
    buffer = stub(np.zeros(x.v.nbytes + 16, np.uint8))
    odd = buffer[2 : 2 + x.v.nbytes].view(x.v.dtype).reshape(x.v.shape)
    odd[...] = x.v
    wide = wide._replace(g=np.broadcast_to(wide.g[:, :1], wide.g.shape))
    expected, end, _ = recurrence.forward(wide, wide_plan, S.astype(np.float64))
    out, last, _ = vector.forward(x._replace(g=constant.view(type(x.v)), v=odd), plan, stub(S))
    assert np.abs(out.astype(np.float64) - expected).max() <= np.abs(expected).max() * 2**-8
    assert np.abs(last - end).max() <= 1e-5 * np.abs(end).max()


def delta():
    return call_of(erase="delta")[0]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("goes token by token", lambda x, plan: (x._replace(gv=x.v), plan)),
        ("does not read along the way", lambda x, plan: (x._replace(q=None), plan)),
        ("float64", lambda x, plan: (x, plan._replace(dtype=np.float64))),
        ("chunk_size=32", lambda x, plan: (x, plan._replace(chunk_size=32))),
        ("take bfloat16", lambda x, plan: (x._replace(v=x.v.astype(np.float32)), plan)),
        ("with the key itself", lambda x, plan: (delta()[0], delta()[1]._replace(erase_reads=ReadState.PREVIOUS))),
        ("after its own write", lambda x, plan: (delta()[0], delta()[1]._replace(query_reads=ReadState.PREVIOUS))),
        ("not CuPy", lambda x, plan: (x, plan._replace(xp=SimpleNamespace(__name__="array_api_compat.numpy")))),
    ],
)
def test_what_is_not_covered_says_why(launched, words, change):
    x, plan = change(*call_of()[0])
    assert words in cuda_calls.unsupported_reason(matrix_state.Call(x, plan))


def test_which_calls_are_taken(launched, monkeypatch):
    assert vector_plan.takes("bfloat16", 128, 8, 90)
    for element, K, V, capability in (
        ("float16", 64, 64, 90),
        ("bfloat16", 64, 64, 80),
        ("bfloat16", 64, 136, 90),
        ("bfloat16", 60, 64, 90),
    ):
        assert not vector_plan.takes(element, K, V, capability)
    x, plan = call_of()[0]
    assert vector.unsupported_reason(matrix_state.Call(x._replace(k=x.k.astype(np.float32)), plan)) is None  # hgrn2
    monkeypatch.setattr(launch, "capability", lambda: 80)
    assert "compute capability 90" in vector.unsupported_reason(matrix_state.Call(x, plan))


@pytest.mark.parametrize("gate", ["bfloat16", "float32"])
def test_shared_memory_fits(gate):
    for name in vector_plan.KERNELS:
        constants = dict(vector_plan.constants(name, vector_plan.VectorKind(128, 128, gate)))
        assert constants["LA_BLOCKS"] * (constants["LA_SHARED"] + 1024) <= 228 * 1024
