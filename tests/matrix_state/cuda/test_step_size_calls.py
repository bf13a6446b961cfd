"""The host side of Mamba-2's kernels, against a twin that works on the bytes they are given: no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from linattn_np.matrix_state.types import Inputs
from linattn_np.ops.cuda import step_size as cuda_step_size
from linattn_np.ops.cuda.arguments import COLUMN_SUMS, STEP_SIZE
from linattn_np.runtime.cuda import launch
from linattn_np.spec import Variables
from linattn_np.variants.shared import step_sizes

from .step_twin import CUPY, KINDS, _rows, stub

THREADS = 256


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None, made=()):
    """What step_size.cu does, in float32."""
    assert file == cuda_step_size.SOURCE
    assert threads == THREADS
    assert {y.ctypes.data for y in made} <= {y.ctypes.data for y in arrays}
    f32 = np.dtype(np.float32)
    if entry == "column_sums":
        unpacked = COLUMN_SUMS.unpack(arguments)
        rows, width, block = unpacked["rows"], unpacked["width"], unpacked["block"]
        x, parts = _rows(unpacked["x"], (4 * width, 4), (rows, width), f32), -(-rows // block)
        assert blocks == parts * -(-width // THREADS)
        to = _rows(unpacked["y"], (4 * width, 4), (parts, width), f32)
        for n in range(parts):
            to[n] = x[n * block : (n + 1) * block].sum(axis=0)
        return
    d = dict(constants)
    own, grad, V = KINDS[d["LA_DTYPE"]], KINDS[d["LA_GRAD"]], d["LA_K"]
    at = unpacked = STEP_SIZE.unpack(arguments)
    rows, T, H, dt_kind, soft, low, high = (
        unpacked[n] for n in ("rows", "T", "heads", "dt_kind", "soft", "low", "high")
    )
    assert blocks == -(-rows // (THREADS // d["LA_LANES"]))
    assert V % d["LA_PER"] == 0

    def lying(data, batch, token, head, group):
        assert group == 1
        return _rows(data, (batch, token, head, own.itemsize), (rows // T // H, T, H, V), own)

    x, z = lying(**unpacked["x"]), lying(**unpacked["z"])
    wide = (rows // T // H, T, H, V)
    dense = lambda name, kind, shape: _rows(at[name], tuple(  # noqa: E731
        kind.itemsize * int(np.prod(shape[i + 1 :])) for i in range(len(shape))), shape, kind)  # fmt: skip
    number = lambda name: dense(name, f32, wide[:3])  # noqa: E731
    by_head = lambda name: dense(name, f32, (H,))  # noqa: E731
    x, D, dout = x.astype(f32), by_head("D"), dense("dout", own, wide)
    other = dense("other", grad, wide)
    if entry.startswith("step_size"):
        raw = dense("dt", KINDS[dt_kind], wide[:3]).astype(f32)
        raw = raw if by_head("bias") is None else raw + by_head("bias")
        after = np.logaddexp(0, raw) if soft else raw
        dt = np.clip(after, low, high)
    if entry == "step_size":
        dense("y", own, wide)[...] = dt[..., None] * x
        number("g")[...] = dt * by_head("A")
    elif entry == "step_size_vjp":
        dv, dg = other.astype(f32), number("dg")
        ddt = np.where((after >= low) & (after <= high), (dv * x).sum(-1) + dg * by_head("A"), 0)
        number("ddt")[...] = ddt * sigmoid(raw) if soft else ddt
        number("dA")[...] = dg * dt
        skipped = 0 if dout is None else D[:, None] * dout.astype(f32)
        dense("dx", own, wide)[...] = dt[..., None] * dv + skipped
        if dout is not None:
            number("dD")[...] = (dout.astype(f32) * x).sum(-1)
    else:
        out = other.astype(f32) + (0 if D is None else D[:, None] * x)
        gate = 1 if z is None else z.astype(f32) * sigmoid(z.astype(f32))
        if entry == "finish":
            dense("y", own, wide)[...] = out * gate
        else:
            z, dout = z.astype(f32), dout.astype(f32)
            dense("dz", own, wide)[...] = dout * out * sigmoid(z) * (1 + z * (1 - sigmoid(z)))
            dense("y", own, wide)[...] = dout * gate


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(launch, "launch", twin)
    monkeypatch.setattr(launch, "unusable", lambda: None)


def variables(xp, arrays, **options):
    """A call as the change of variables sees it."""
    B = C = np.zeros((1, 1, 1, 1), np.float32)
    sizes = Variables(Hq=1, H=arrays["x"].shape[-2])
    options = {"dt_softplus": True, "dt_limit": (0.0, np.inf)} | options
    given = dict.fromkeys(("D", "z", "dt_bias")) | arrays
    return Variables(
        **given, B=B, C=C, xp=xp, dtype=np.float32, name="mamba2", sizes=sizes, options=options, kernels=True
    )


def everything(c, out, dout, dv, dg):
    """Variables, output and gradients by name."""
    x = step_sizes.to_core(c)
    finished = step_sizes.from_core(c, out)
    dcore, grads = step_sizes.from_core_vjp(c, out, dout)
    extended = c.extended({n: grads.pop(n) for n in [*grads] if n == "dskipped"})
    more = step_sizes.to_core_vjp(extended, Inputs(**dict.fromkeys(Inputs._fields) | {"v": dv, "g": dg[..., None]}))
    for n, y in more.items():
        grads[n] = y if n not in grads else grads[n] + y
    found = {"v": x.v, "g": x.g, "out": finished, "dcore": dcore} | {f"d{n}": y for n, y in grads.items()}
    return {n: y for n, y in found.items() if n not in ("dB", "dC")}


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda k: np.dtype(k).name)
@pytest.mark.parametrize("parts", ["", "D", "z", "+", "Dz+", "DVz"])  # V: D of every channel, which no kernel takes
@pytest.mark.parametrize("how", ["plain", "apart", "one batch", "no batch", "limits", "many"])
def test_kernels_and_array_calls_agree(launched, kind, parts, how):
    import array_api_compat.numpy as xp

    rng = np.random.default_rng(3)
    lead = {"one batch": (1,), "no batch": (), "many": (2, 3)}.get(how, (2,))
    T, H, V = 700 if how == "no batch" else 7, 3, 12
    draw = lambda *shape: rng.standard_normal(shape).astype(kind)  # noqa: E731
    arrays = {"x": draw(*lead, T, H, V), "dt": draw(*lead, T, H), "A": -rng.uniform(0.1, 1, H).astype(np.float32)}
    arrays |= {"D": rng.standard_normal((H, V) if "V" in parts else H).astype(np.float32)} if "D" in parts else {}
    arrays |= {"z": draw(*lead, T, H, V)} if "z" in parts else {}
    arrays |= {"dt_bias": rng.standard_normal(H).astype(np.float32)} if "+" in parts else {}
    options = {"dt_softplus": False, "dt_limit": (0.2, 0.9)} if how == "limits" else {}
    others = [draw(*lead, T, H, V) for _ in range(3)] + [rng.standard_normal((*lead, T, H)).astype(np.float32)]
    expected = everything(variables(xp, arrays, **options), *(y.astype(np.float32) for y in others))

    there = {n: stub(y) for n, y in arrays.items()}
    if how == "apart":  # every second number of rows twice as long
        for n in ("x", "z"):
            if n in there:
                there[n] = stub(np.repeat(arrays[n], 2, axis=-1))[..., ::2]
    found = everything(variables(CUPY, there, **options), *map(stub, others))
    assert cuda_step_size.takes(CUPY, there["x"])
    assert not cuda_step_size.takes(CUPY, there["x"][..., :0, :, :])
    assert found.keys() == expected.keys()
    bound = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[np.dtype(kind).name]
    for n, y in expected.items():
        error = np.linalg.norm(np.asarray(found[n], np.float64) - np.asarray(y, np.float64).reshape(found[n].shape))
        assert error <= bound * max(np.linalg.norm(np.asarray(y, np.float64)), 1e-3), n
