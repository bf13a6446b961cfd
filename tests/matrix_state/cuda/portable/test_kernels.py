"""Vector decays in portable chunks on a GPU, against NumPy in float64 on the same rounded inputs."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy
from linattn_np.matrix_state.cuda.portable import calls as portable
from linattn_np.matrix_state.types import Decay, Erase, EraseKey
from linattn_np.runtime.cuda import launch
from tests.cases import has_plain_state, one_per, required
from tests.matrix_state.cuda.device_arrays import check_same_bits, error, poisoned, same
from tests.matrix_state.cuda.token.test_gradient_kernels import DRAWN, draw

pytestmark = pytest.mark.gpu
BOUND = {"float32": 6e-6, "float16": 1e-3, "bfloat16": 6e-3}  # of the norm of the result
FUNCTIONS = one_per(lambda spec: (spec.erase, spec.query_reads), [
    fn for fn in la.VARIANTS if has_plain_state(fn.spec) and fn.spec.decay is Decay.VECTOR
    and (fn.spec.erase is Erase.NONE or fn.spec.change.erase_key is EraseKey.KEY)
    and DRAWN.issuperset(required(fn))])  # fmt: skip


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """No warpgroup products; new memory is full of NaN."""
    monkeypatch.setattr(policy, "PORTABLE", True)
    monkeypatch.setattr(replay, "by_key", {})
    monkeypatch.setattr(launch, "array_type", lambda: poisoned)


def typed(drawn, dtype):
    if dtype != "bfloat16":
        return drawn
    kind = pytest.importorskip("ml_dtypes").bfloat16
    arrays, state, dout, dstate = drawn
    return {n: x.astype(kind) if n in "qkv" else x for n, x in arrays.items()}, state, dout.astype(kind), dstate


def compare(cp, fn, dtype="float32", options=None, **how):
    drawn = typed(draw(fn, dtype="float32" if dtype == "bfloat16" else dtype, **how), dtype)
    check(cp, fn, drawn, dtype, options or {})


def check(cp, fn, drawn, dtype, options=MappingProxyType({})):
    arrays, state, dout, dstate = drawn
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    said = la.explain(fn, **there, **options)
    assert (said.backend, said.form, said.chunk_size) == ("cuda", "chunk form", policy.PORTABLE_CHUNK)
    given = dstate.astype(np.float32)
    (out, end), pull = la.vjp(fn, **there, state=cp.asarray(state), return_state=True, **options)
    grads = pull(cp.asarray(dout), cp.asarray(given))._asdict()
    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    (expected, last), pull = la.vjp(fn, **wide, state=state.astype(np.float64), return_state=True, backend="chunks",
                                    **options)  # fmt: skip
    right = pull(dout.astype(np.float64), given.astype(np.float64))._asdict()
    assert error(out, expected) < BOUND[dtype]
    assert error(end, last) < BOUND[dtype]
    for name, want in right.items():
        if want is not None:
            assert error(grads[name], want) < BOUND[dtype], name


@pytest.mark.parametrize("kind", ["zero", "mild", "five", "twenty", "resets", "mixed"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_gates(cp, fn, kind):
    compare(cp, fn, kind=kind, T=150)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_dtypes(cp, fn, dtype):
    compare(cp, fn, dtype, K=128, V=128, T=300)


@pytest.mark.parametrize(("K", "V"), [(7, 5), (100, 60), (128, 128), (192, 100), (256, 256)])
def test_widths(cp, K, V):
    for fn in FUNCTIONS if K <= 192 else FUNCTIONS[:1]:
        compare(cp, fn, K=K, V=V, T=65)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_least_shared_memory(cp, monkeypatch, fn):
    monkeypatch.setattr(launch, "shared_limit", lambda: policy.LEAST_SHARED)
    compare(cp, fn, K=128, V=128, T=65)


def test_one_key(cp):
    """One key at every token, erased as a whole."""
    arrays, *_ = drawn = draw(la.kda, T=70, kind="zero")
    arrays["k"][:], arrays["beta"][:] = arrays["k"][:, :1], 1
    check(cp, la.kda, drawn, "float32")


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("kept", [False, True])
def test_segments(cp, monkeypatch, fn, kept):
    """Three of a sequence, the last one shorter. kept: the backward has what the forward has computed of them."""
    if not kept:
        forward = portable.forward
        monkeypatch.setattr(portable, "forward", lambda *call: (*(f := forward(*call))[:2], f[2]._replace(starts=None)))
    monkeypatch.setattr(policy, "SEGMENT_TOKENS", 128)
    compare(cp, fn, T=700)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("whole", [False, True])
def test_slow_decays_of_a_long_sequence(cp, monkeypatch, fn, whole):
    """A decay near 1 is always rounded the same way. whole: not in segments."""
    if whole:
        monkeypatch.setattr(policy, "PORTABLE_SEGMENTS", 1 << 30)
    arrays, *_ = drawn = draw(fn, T=16384, heads=(1, 1, 1), K=16, V=16)
    arrays["g"][:] = -1e-4
    check(cp, fn, drawn, "float32")


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_ragged_and_grouped(cp, fn):
    compare(cp, fn, options={"cu_seqlens": [0, 5, 5, 70, 300, 301]}, T=301, N=5)
    compare(cp, fn, heads=(1, 1, 4), T=33)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_no_later_token_changes_a_bit(cp, fn):
    arrays, *_ = draw(fn, T=70, kind="mixed")
    there = {n: cp.asarray(x) for n, x in arrays.items()}
    later = {n: x.copy() for n, x in there.items()}
    for n, x in later.items():
        if n != "u":
            x[:, 41:] *= 3
    assert same(fn(**there)[:, :41], fn(**later)[:, :41])


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_same_bits(cp, fn):
    """On every run, alone and packed."""
    arrays, state, dout, dstate = draw(fn, T=150, kind="mixed")
    double = {n: x if n == "u" else np.concatenate([x, x[:, ::-1]]) for n, x in arrays.items()}
    states, cotangent = np.concatenate([state, 2 * state]), np.concatenate([dout, dout[:, ::-1]])
    check_same_bits(cp, fn, double, states, cotangent, np.concatenate([dstate, dstate]).astype(np.float32))
