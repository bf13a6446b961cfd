"""Mixtures of dtypes on a GPU: a call has a kernel, or la.explain says that it is slow and names a faster one."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda import operands
from linattn_np.runtime.cuda import launch
from tests.cases import CASES
from tests.matrix_state.cuda.step_twin import Namespace, Stub, stub, xp
from tests.matrix_state.cuda.token.host import launched, public  # noqa: F401

B16, F16, F32, F64 = ml_dtypes.bfloat16, np.float16, np.float32, np.float64
MAPPED = (la.performer, la.rfa)
PLAIN = [c for c in CASES if not ("feature_map" in c.options or c.fn in MAPPED)]  # maps are of NumPy's arrays here


@pytest.fixture
def hopper(public, monkeypatch):  # noqa: F811
    """Public functions take stubs; nothing is launched, since only choices are looked at."""
    monkeypatch.setattr(launch, "capability", lambda: 90)
    monkeypatch.setattr(launch, "multiprocessors", lambda: 132)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: None)
    monkeypatch.setattr(operands, "unsupported_reason", lambda x: None)  # of devices, which arrays of maps lack here
    monkeypatch.setattr(operands, "alignment", lambda arrays, K, V: 16)

    def wrapped(self, name):
        f = getattr(xp, name)
        if isinstance(f, type | np.dtype) or not callable(f):
            return f
        return lambda *given, **named: as_stub(f(*given, **named))

    monkeypatch.setattr(Namespace, "__getattr__", wrapped)


def as_stub(y):
    return y.view(Stub) if isinstance(y, np.ndarray) else y


def explained(fn, kinds, T=96, options=None, **sizes):
    """The explanation of a call whose arrays have these dtypes by name, float32 others; complex ones complex64."""
    sizes = {"B": (1,), "H": 2, "K": 64, "V": 64} | sizes
    drawn = la.testing.sample(fn, np.random.default_rng(0), T=T, optional=False, **sizes)
    kinds = {n: np.complex64 if np.iscomplexobj(x) else kinds.get(n, F32) for n, x in drawn.items()}
    given = {n: stub(np.asarray(x, kinds[n])) for n, x in drawn.items()}
    return la.explain(fn, **given, **options or {})


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_mixture_of_dtypes_is_fast_or_said_to_be_slow(hopper, case):
    """Rows of one dtype and of two, gates of each: a slow path is named, with what would be fast if anything is."""
    rows = [n for n in case.spec.arrays if n in ("q", "k", "v", "x", "B", "C")]
    for row, gate, odd in itertools.product((B16, F16, F32, F64), (B16, F32), (None, *rows)):
        kinds = dict.fromkeys(case.spec.arrays, gate) | dict.fromkeys(rows, row)
        kinds |= {} if odd is None else {odd: F32}
        options = {n: x for n, x in case.options.items() if n != "chunk_size"}
        explanation = explained(case.fn, kinds, options=options)
        covered = explanation.others.get("cuda") == "covers the call too"
        assert bool(explanation.slow) or explanation.backend == "cuda" or covered, explanation
        if explanation.backend != "cuda" and not covered:
            assert explanation.slow.startswith("array calls instead of CUDA kernels: "), explanation
            assert "; fast with" in explanation.slow or "; no dtype" in explanation.slow, explanation
        assert ("slow path: " + explanation.slow in str(explanation)) == bool(explanation.slow)


@pytest.mark.parametrize("T", [96, 8192])
def test_rows_that_gates_scale_stay_bfloat16(hopper, T):
    """gdn2 with float32 b and w: the rows that they scale stay bfloat16, so that tensor cores compute the products."""
    rows = dict.fromkeys("qkv", B16)
    one = explained(la.gdn2, rows | {"g": F32, "b": F32, "w": F32}, T=T, H=1)
    assert (one.backend, one.form, one.slow) == ("cuda", "chunk form", "")
    both = explained(la.gdn2, dict.fromkeys(la.gdn2.spec.arrays, B16) | {"g": F32}, T=T, H=1)
    assert one.reason == both.reason


def test_a_float32_row_is_not_rounded(hopper):
    for odd in "qkv":
        explanation = explained(la.gdn2, dict.fromkeys("qkv", B16) | {odd: F32})
        assert "fast with bfloat16 q, k, v" in explanation.slow or "one dtype of 16 bits" in explanation.slow, (
            explanation
        )


def test_gradients_by_array_calls_are_said_to_be_slow(hopper):
    """Decays of both axes: all are kernels, but for more heads of queries than of values."""
    explanation = explained(la.dfw, dict.fromkeys("qkv", B16), Hq=4)
    assert explanation.backend == "cuda"
    assert explanation.slow.startswith("token by token instead of chunks")
    assert "gradients by array calls" in explanation.slow
    assert explained(la.gla, dict.fromkeys("qkv", B16)).slow == ""
    assert explained(la.dfw, dict.fromkeys("qkv", B16)).slow == ""
    assert explained(la.dfw, {}).slow == ""


def test_the_named_remedy_is_one(hopper):
    """What explain names is fast."""
    slow = explained(la.gdn2, {}, T=8192, H=1)
    assert "; fast with bfloat16 q, k, v" in slow.slow
    assert explained(la.gdn2, dict.fromkeys(la.gdn2.spec.arrays, B16), T=8192, H=1).slow == ""
    wide = explained(la.gated_delta_rule, dict.fromkeys("qkv", B16), K=320, V=320)
    assert "; fast with float32 arrays of up to 256 channels" in wide.slow
    assert explained(la.gated_delta_rule, {}, K=256, V=256).slow == ""
    chunked = explained(la.gla, dict.fromkeys("qkv", B16), options={"backend": "chunks"})
    assert "; fast without backend" in chunked.slow
