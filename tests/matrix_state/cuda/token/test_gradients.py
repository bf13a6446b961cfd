"""Gradients token by token: the host side, against twins of the kernels in NumPy. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state import definition as recurrence
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.token import gradients as kernels
from linattn_np.matrix_state.types import EraseKey, Saved
from linattn_np.runtime.cuda import launch
from tests.core_cases import case
from tests.matrix_state.cuda.step_twin import CUPY, stub
from tests.matrix_state.cuda.token import gradients_twin as twin


@pytest.fixture
def launched(monkeypatch):
    """(entry, whether from the last token on) of every launch."""
    found = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        found.append((entry, dict(constants)["LA_BACK"]))
        twin.run(entry, constants, arguments, blocks)

    for name, value in {"launch": launch_twin, "current_device": lambda: 0, "unusable": lambda: None}.items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(policy, "RECURRENCE_BACKWARD", True)
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"decay": "vector"},
        {"decay": "vector", "erase": "free"},
        {"decay": "none", "erase": "free"},
        {"decay": "vector", "erase": "delta"},
        {"decay": "vector", "erase": "delta undecayed"},
        {"decay": "vector", "read": "bonus"},
        {"decay": "vector", "read": "before"},
        {"decay": "vector", "offsets": [0, 3, 3, 40], "B": 1},
        {"decay": "vector", "heads": (1, 1, 4), "erase": "free"},
        {"decay": "vector", "T": 150, "B": 1},
        {"decay": "vector", "dtype": np.float16, "K": 8, "V": 4},
        {"decay": "vector", "resets": True},
    ],
    ids=str,
)
def test_gradients(launched, how):
    how = {"T": 40, "erase": "none", "read": "after", "dtype": np.float32} | how
    dtype, resets = how.pop("dtype"), how.pop("resets", False)
    x, plan, S, dout, dS = case(how.pop("decay"), how.pop("erase"), how.pop("read"), how.pop("T"), None, **how)
    if resets:
        x.g[:, 7], x.g[:, 20, :, 0] = -np.inf, -30.0
    there = type(x)(*(None if y is None else stub(y.astype(dtype)) for y in x))
    wide = type(x)(*(None if y is None else y.astype(np.float64) for y in there))
    own = plan._replace(xp=CUPY, dtype=np.float32)
    saved = Saved(there, own, stub(S.astype(np.float32)), None)
    assert kernels.unsupported_reason(saved) is None
    grads, first = kernels.backward(saved, stub(dout.astype(dtype)), stub(dS.astype(np.float32)))
    right, dS0 = recurrence.backward(recurrence.forward(wide, plan, S)[2], dout.astype(dtype).astype(np.float64), dS)
    bound = 2e-5 if dtype is np.float32 else 4e-3
    for name, want in right._asdict().items():
        if want is not None:
            found = np.asarray(getattr(grads, name), np.float64)
            assert found.shape == want.shape, name
            assert np.linalg.norm(found - want) <= bound * np.linalg.norm(want), name
    assert np.linalg.norm(first - dS0) <= bound * np.linalg.norm(dS0)
    back = [("values", 1), ("channels", 0), ("channels", 1)]
    assert launched == ([("values", 0), *back] if x.a is not None or x.beta is not None else back)


def test_keys_that_erase(launched):
    """The gradient of the erase vectors is in that of the keys where they are the same."""
    x, plan, _, dout, _ = case("vector", "delta", "after", 40, None)
    x, plan = x._replace(r=x.k), plan._replace(erase_key=EraseKey.KEY)
    there = type(x)(*(None if y is None else stub(y.astype(np.float32)) for y in x))
    saved = Saved(there, plan._replace(xp=CUPY, dtype=np.float32), None, None)
    grads, _ = kernels.backward(saved, stub(dout.astype(np.float32)), None)
    right, _ = recurrence.backward(recurrence.forward(x, plan, None)[2], dout, None)
    dk = right.k if right.r is None else right.k + right.r
    assert grads.r is None
    assert np.linalg.norm(grads.k - dk) <= 2e-5 * np.linalg.norm(dk)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("are off", None),
        ("decays of the key channels", lambda x: x._replace(gv=x.v)),
        ("no more heads", lambda x: x._replace(q=np.repeat(x.q, 2, axis=-2))),
    ],
)
def test_what_is_not_covered_says_why(launched, monkeypatch, words, change):
    x, plan, S, *_ = case("vector", "none", "after", 40, None)
    if change is None:
        monkeypatch.setattr(policy, "RECURRENCE_BACKWARD", False)
    saved = Saved(x if change is None else change(x), plan, S, None)
    assert words in kernels.unsupported_reason(saved)
