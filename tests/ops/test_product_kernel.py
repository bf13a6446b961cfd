"""Products of two arrays in 16 bits by their kernels: through a twin in NumPy, and on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops.cuda import product
from linattn_np.ops.cuda.arguments import PRODUCT
from linattn_np.products import products
from linattn_np.runtime.cuda import launch
from linattn_np.spec import Variables
from tests.matrix_state.cuda.step_twin import CUPY, stub

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def run(entry, arguments):
    """One launch."""
    a = SimpleNamespace(**PRODUCT.unpack(arguments))
    x, y, z, add, dx, dy = (None if not at else np.frombuffer((ctypes.c_uint16 * a.size).from_address(at), BFLOAT16)
                            for at in (a.x, a.y, a.z, a.add, a.dx, a.dy))  # fmt: skip
    if entry == "product":
        z[:] = x.astype(np.float32) * y.astype(np.float32)
        return
    more = 0 if add is None else add.astype(np.float32)
    dx[:] = z.astype(np.float32) * y.astype(np.float32) + more
    dy[:] = z.astype(np.float32) * x.astype(np.float32)


def variables(xp, **arrays):
    axes = {"q": "T H K", "k": "T H K", "b": "T H K", "v": "T H V", "w": "T H V"}
    return Variables(**arrays, xp=xp, dtype=np.float32, axes=axes, kernels=True,
                     sizes=SimpleNamespace(batch=(1,), T=6, H=2))  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "views", "float32"])
def test_products_and_gradients(monkeypatch, kind):
    """Of dense arrays by the kernels, of others by array calls, rounded alike; in float32 not rounded."""
    launched = []

    def launch_twin(file, entry, constants, blocks, threads, shared, arguments, arrays=None):
        launched.append(entry)
        run(entry, arguments)

    monkeypatch.setattr(launch, "launch", launch_twin)
    monkeypatch.setattr(launch, "unusable", lambda: None)
    rng, dtype = np.random.default_rng(0), np.float32 if kind == "float32" else BFLOAT16
    wide = {n: rng.standard_normal((1, 6, 2, 8)).astype(dtype) for n in "kbvw"}
    arrays = {n: stub(x) for n, x in wide.items()}
    if kind == "views":
        arrays = {n: stub(np.repeat(x, 2, axis=-1))[..., ::2] for n, x in wide.items()}
    change = products("q", "k", v=("w", "v"), r=("b", "k"))
    c = variables(CUPY, q=arrays["k"], **arrays)
    made = change.to_core(c)
    exact = {n: x.astype(np.float32) for n, x in wide.items()}
    for found, right in ((made.v, exact["w"] * exact["v"]), (made.r, exact["b"] * exact["k"])):
        assert found.dtype == dtype
        assert np.array_equal(found, right.astype(dtype))
    d = {n: stub(rng.standard_normal((1, 6, 2, 8)).astype(dtype)) for n in ("k", "v", "r")}
    grads = change.to_core_vjp(c, type(made)(**dict.fromkeys(made._fields) | d))
    dk, dv, dr = (d[n].astype(np.float32) for n in ("k", "v", "r"))
    for name, right in (("k", dk + dr * exact["b"]), ("b", dr * exact["k"]), ("v", dv * exact["w"]),
                        ("w", dv * exact["v"])):  # fmt: skip
        assert np.abs(grads[name].astype(np.float32) - right).max() <= np.abs(right).max() * 2**-8, name
    assert launched == (["product"] * 2 + ["product_vjp"] * 2 if kind == "dense" else [])


@pytest.mark.gpu
def test_kernels():
    cp = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    x, y, dz, add = (cp.asarray(rng.standard_normal((3, 7, 2, 40)).astype(BFLOAT16)) for _ in range(4))
    assert product.takes(x, y, dz, add)
    wide = [np.asarray(a.get()).astype(np.float32) for a in (x, y, dz, add)]
    found = [
        product.product(cp, x, y),
        *product.product_vjp(cp, x, y, dz, add),
        product.product_vjp(cp, x, y, dz, None)[0],
    ]
    right = [wide[0] * wide[1], wide[2] * wide[1] + wide[3], wide[2] * wide[0], wide[2] * wide[1]]
    for a, b in zip(found, right, strict=True):
        assert np.abs(np.asarray(a.get()).astype(np.float32) - b).max() <= np.abs(b).max() * 2**-8
