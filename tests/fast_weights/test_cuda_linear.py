"""The kernels of a linear model with a layer norm, emulated here or on a GPU, against the definition in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.fast_weights.states import LinearState
from tests.cuda.emulation import device, emulated, public  # noqa: F401

BFLOAT16, FLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
TOKENS = ("q", "k", "v")
D = 64  # channels
# of the norm of an array: roundings of weights, gradients and factors to operands of products
TOLERANCES = {BFLOAT16: 2.0**-8, FLOAT16: 2.0**-11, FLOAT32: 2.0**-18}


def drawn(T, H=2, B=(1,), dtype=FLOAT32, gain=False, seed=0, D=D):
    """Arrays by name: tokens in `dtype`, the others in float32."""
    rng = np.random.default_rng(seed)
    arrays = la.testing.sample(la.ttt_linear, rng, B=B, T=T, H=H, K=D)
    if not gain:
        arrays.pop("gain", None)
    return {n: x.astype(dtype if n in TOKENS else np.float32) for n, x in arrays.items()}


def called(arrays, bring=np.asarray, see=np.asarray, state=None, kind=None, with_dout=True, **options):
    """Out, parts of the final state, gradients; kind: the dtype that the cotangent of out is rounded to."""
    given = {n: bring(x) for n, x in arrays.items()}
    if state is not None:
        given["state"] = type(state)(*map(bring, state))
    (out, end), pull = la.vjp(la.ttt_linear, **given, return_state=True, **options)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(kind or out.dtype).astype(out.dtype)
    dend = [bring(rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype)) for x in end[:-1]]
    found = pull(bring(dout) if with_dout else None, type(end)(*dend, end[-1]))
    grads = {f"d{n}": getattr(found, n) for n in arrays}
    grads |= {} if state is None else {f"dstate.{n}": getattr(found.state, n) for n in end._fields[:-1]}
    ends = {f"state.{n}": getattr(end, n) for n in end._fields[:-1]}
    return {n: see(y) for n, y in ({"out": out} | ends | grads).items()}


def quick(device):  # noqa: F811
    """The dtype whose products are emulated in seconds; float32 on a GPU."""
    return FLOAT32 if device.launched is None else BFLOAT16


def compare(device, arrays, state=None, **options):  # noqa: F811
    """Results and gradients against the definition; the kernels have done it."""
    found = called(arrays, device.bring, device.see, state, **options)
    wide = {n: x.astype(float) for n, x in arrays.items()}
    start = None if state is None else type(state)(*(x.astype(float) for x in state[:-1]), state[-1])
    exact = called(wide, state=start, kind=arrays["v"].dtype, backend="reference", **options)
    assert found.keys() == exact.keys()
    # Float32 numbers as large as `whole` are subtracted: a state is W_t - W_0; dW is the gradient of the weights before
    # the first token, which has the cotangents of the final state in it, less those cotangents.
    ends = {n: np.sqrt(2 * exact[f"state.{n}"].size) for n in "Wb"}
    whole = {f"d{n}": size for n, size in ends.items()}
    whole |= {f"state.{n}{start}": np.linalg.norm(arrays[n]) for n in "Wb" for start in ("", "_start")}
    for n, e in exact.items():
        error = np.linalg.norm(found[n].astype(float) - e)
        size = TOLERANCES[arrays["v"].dtype] * np.linalg.norm(e) + TOLERANCES[FLOAT32] * whole.get(n, 0)
        assert error <= size, (n, error, size)
    if device.launched is not None:
        found = {entry for file, entry, *_ in device.launched if "fast_weights/linear" in file}
        assert found == {"linear", "linear_vjp"}


LENGTHS = [
    (1, 16, "after"),
    (15, 16, "before"),
    (16, 16, "after"),
    (33, 16, "before"),
    (13, 5, "after"),
    (3, 1, "before"),
]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_it_is_the_definition_in_every_dtype(public, dtype):  # noqa: F811
    """Mini-batches of which the last is short; in bfloat16 two groups of them."""
    compare(public, drawn(68 if dtype == BFLOAT16 else 20, H=1, dtype=dtype, gain=dtype != FLOAT16))


@pytest.mark.parametrize(("T", "mini_batch", "read"), LENGTHS)
def test_lengths_and_mini_batches(public, T, mini_batch, read):  # noqa: F811
    compare(public, drawn(T, H=1, dtype=quick(public), gain=read == "before"), read=read, mini_batch=mini_batch)


def test_heads_of_a_batch_and_a_scale(public):  # noqa: F811
    compare(public, drawn(5, H=3, B=(2,), dtype=quick(public)), scale=0.5)


def test_sequences_of_a_ragged_batch(public):  # noqa: F811
    compare(public, drawn(21, H=1, B=(), dtype=quick(public)), cu_seqlens=np.array([0, 3, 3, 20, 21]))


@pytest.mark.parametrize("length", [16, 21])
def test_a_state_begins_a_mini_batch_or_is_in_one(public, length):  # noqa: F811
    """Up to the end of the mini-batch array calls compute the tokens."""
    rng, arrays = np.random.default_rng(2), drawn(30, H=1, dtype=quick(public))
    W, b = ((0.1 * rng.standard_normal((1, *arrays[n].shape))).astype(np.float32) for n in "Wb")
    compare(public, arrays, LinearState(W, b, 0.9 * W, 0.9 * b, np.array([length])))


def test_no_cotangent_of_outputs(public):  # noqa: F811
    compare(public, drawn(18, H=1), with_dout=False)


def test_halves_with_the_state_handed_over_are_the_whole(public):  # noqa: F811
    arrays = {n: public.bring(x) for n, x in drawn(48, H=1, dtype=quick(public), gain=True).items()}
    out, end = la.ttt_linear(**arrays, return_state=True)
    split = lambda a, b: {n: x[:, a:b] if n in (*TOKENS, "eta", "gain") else x for n, x in arrays.items()}  # noqa: E731
    first, state = la.ttt_linear(**split(0, 16), return_state=True)
    second, last = la.ttt_linear(**split(16, 48), state=state, return_state=True)
    assert np.array_equal(public.see(first), public.see(out)[:, :16])
    for y, e in [(second, out[:, 16:]), *zip(last[:-1], end[:-1], strict=True)]:
        y, e = public.see(y), public.see(e)
        y, e = y.astype(float), e.astype(float)
        assert np.linalg.norm(y - e) <= TOLERANCES[quick(public)] * np.linalg.norm(e)


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [(drawn(4, D=32), {}, "64 channels"), (drawn(4), {"mini_batch": 17}, "up to 16 tokens"),
     (drawn(4, dtype=FLOAT32) | {"v": drawn(4)["v"].astype(float)}, {}, "one dtype")],
    ids=["width", "mini_batch", "dtype"],
)  # fmt: skip
def test_explain_says_why_other_calls_are_array_calls(public, arrays, options, reason):  # noqa: F811
    given = {n: public.bring(x) for n, x in arrays.items()}
    assert reason in str(la.explain(la.ttt_linear, **given, **options))
    la.ttt_linear(**given, **options)
    assert not public.launched or not [file for file, *_ in public.launched if "fast_weights/linear" in file]
