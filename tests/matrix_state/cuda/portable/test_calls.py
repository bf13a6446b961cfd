"""Vector decays in portable chunks: the host side, against twins of the kernels in NumPy. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import core as matrix_state
from linattn_np.matrix_state import definition, policy
from linattn_np.matrix_state.cuda import calls
from linattn_np.matrix_state.cuda.portable import calls as portable
from linattn_np.matrix_state.types import Erase, EraseKey
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.portable import twin
from tests.matrix_state.cuda.step_twin import CUPY, stub


@pytest.fixture
def launched(monkeypatch):
    """(entry, whether from the last token on) of every launch."""
    found = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        folder = file.partition("/")[0]
        assert folder == "portable"
        found.append((entry, dict(constants).get("LA_BACK")))
        twin.run(entry, constants, arguments, blocks)

    changes = {"launch": launch_twin, "current_device": lambda: 0, "unusable": lambda: None, "capability": lambda: 80,
               "shared_limit": lambda: policy.LEAST_SHARED, "multiprocessors": lambda: 132}  # fmt: skip
    for name, change in changes.items():
        monkeypatch.setattr(launch, name, change)
    return found


CHUNKS = [("values", 0), ("values", 1), ("channels", 0), ("channels", 1)]


def keyed(x, plan):
    """The same with keys that erase."""
    return (x._replace(r=x.k), plan._replace(erase_key=EraseKey.KEY)) if x.erase is Erase.DELTA else (x, plan)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"erase": "delta"},
        {"erase": "delta", "kept": True, "T": 150, "B": 1},
        {"read": "bonus"},
        {"read": "before"},
        {"offsets": [0, 3, 3, 40], "B": 1},
        {"heads": (1, 1, 4)},
        {"heads": (1, 1, 4), "erase": "delta"},
        {"heads": (1, 1, 4), "read": "bonus"},
        {"T": 150, "B": 1},
        {"offsets": [0, 3, 3, 40], "B": 1, "erase": "delta"},
        {"offsets": [0, 3, 3, 40], "B": 1, "read": "bonus"},
        {"dtype": np.float16, "K": 8, "V": 4},
        {"dtype": np.float16, "erase": "delta", "K": 7, "V": 5},
    ],
    ids=str,
)
def test_forward_and_gradients(launched, how):
    x, kept = check(**how)
    again = x.erase is Erase.DELTA and not kept  # the errors of the delta rule
    assert launched == CHUNKS[:again] + CHUNKS + [("bonus", None)] * (x.u is not None)


def check(**how):
    """(inputs, whether the forward keeps what gradients need) of a call that agrees with float64."""
    how = {"T": 40, "erase": "none", "read": "after", "dtype": np.float32, "kept": False} | how
    dtype, kept = how.pop("dtype"), how.pop("kept")
    x, plan, S, dout, dS = case("vector", how.pop("erase"), how.pop("read"), how.pop("T"), None, **how)
    x, plan = keyed(x, plan)
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    wide = type(x)(*(None if y is None else y.astype(np.float64) for y in there))
    call = matrix_state.Call(there, plan._replace(xp=CUPY, dtype=np.float32, gradients=kept))
    assert calls.unsupported_reason(call) is None
    assert calls.form(call) == ("chunk form", policy.PORTABLE_CHUNK)
    assert "mma.sync" in calls.describe(call)
    out, end, saved = calls.forward(*call, stub(S.astype(np.float32)))
    grads, first = calls.backward(saved, stub(dout.astype(dtype)), stub(dS.astype(np.float32)))
    expected, last, residuals = definition.forward(wide, plan, S)
    right, dS0 = definition.backward(residuals, dout.astype(dtype).astype(np.float64), dS)
    bound = 2e-5 if dtype is np.float32 else 4e-3
    near = lambda a, b: np.linalg.norm(np.asarray(a, np.float64) - b) <= bound * np.linalg.norm(b)  # noqa: E731
    assert near(out, expected)
    assert near(end, last)
    assert near(first, dS0)
    if right.r is not None:
        right = right._replace(k=right.k + right.r, r=None)
    for name, want in right._asdict().items():
        assert want is None or near(getattr(grads, name), want), name
    return x, kept


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", [{"erase": "delta"}, {"read": "bonus"}, {"heads": (1, 1, 2)}], ids=str)
def test_segments(launched, monkeypatch, how, kept):
    """Two sequences of three segments; what they make of the state before is computed by passes of their own."""
    monkeypatch.setattr(policy, "SEGMENT_TOKENS", 128)
    x, _ = check(T=700, kept=kept, **how)
    erase = x.erase is Erase.DELTA
    ahead = (1 + erase) * CHUNKS[:1]
    again = [] if kept else ahead + erase * CHUNKS[:1]
    bonus = [("bonus", None)] * (x.u is not None)
    assert launched == ahead + CHUNKS[:1] + again + CHUNKS[1:2] + CHUNKS[1:] + bonus


def unsupported(how, change=lambda x, plan: (x, plan), dtype=np.float32):
    x, plan, *_ = case(how.pop("decay", "vector"), how.pop("erase", "none"), how.pop("read", "after"), 40, None, **how)
    x, plan = change(*keyed(x, plan))
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    return portable.unsupported_reason(matrix_state.Call(there, plan._replace(xp=CUPY, dtype=dtype)))


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("are off", {}),
        ("decays of the key channels", {"decay": "scalar"}),
        ("after the decay", {"erase": "delta undecayed"}),
        ("without an erase term or with", {"erase": "free"}),
        ("more heads of queries", {"heads": (4, 1, 1)}),
        ("300 and values", {"K": 300, "V": 4}),
    ],
    ids=str,
)
def test_what_is_not_covered(launched, monkeypatch, words, how):
    if words == "are off":
        monkeypatch.setattr(policy, "PORTABLE_CHUNKS", False)
    reason = unsupported(dict(how))
    assert reason is not None
    assert words in reason


def test_float32_of_any_length(launched):
    """The decay of a chunk has two terms; token by token it is rounded at every token."""
    x, plan, *_ = case("vector", "none", "after", policy.FLOAT32_RECURRENCE + 1, None, heads=(1, 1, 1), B=1, K=8, V=8)
    there = type(x)(*(None if y is None else stub(y.astype(np.float32)) for y in x))
    call = matrix_state.Call(there, plan._replace(xp=CUPY, dtype=np.float32))
    assert calls.form(call) == ("chunk form", policy.PORTABLE_CHUNK)


def test_what_a_block_holds(launched, monkeypatch):
    """Keys of 256 channels with the delta rule take more memory than every device has."""
    assert unsupported({"K": 256, "V": 128}) is None
    assert unsupported({"K": 256, "V": 128, "erase": "delta"}) is not None
    monkeypatch.setattr(launch, "shared_limit", lambda: policy.GROUP_SHARED)
    assert unsupported({"K": 256, "V": 128, "erase": "delta"}) is None
