"""What tests of remembered calls share: calls on copies, and what comes out of a call after one that is remembered."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.call.replay import plans as replay
from tests.cases import parts

LENGTHS = {"tokens": 5, "chunks": 40}  # the two compiled forms
B, H, K = 2, 3, 8  # keys and values are of one width: shapes of two arrays may be equal
every_form = pytest.mark.parametrize("T", LENGTHS.values(), ids=LENGTHS)


def numbers(shape, seed, low=-1.0, high=1.0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def given(T, seed=0, B=B, H=H, K=K):
    """Arrays of gated_delta_rule, and a state."""
    q, k, v = (numbers((B, T, H, K), 10 * seed + n) for n in range(3))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": q, "k": k, "v": v, "g": numbers((B, T, H), 10 * seed + 3, -1, 0),
         "beta": numbers((B, T, H), 10 * seed + 4, 0, 2)}  # fmt: skip
    return x, numbers((B, H, K, K), 10 * seed + 5)


def copied(x):
    """The same numbers, strides, memory that is shared and writeability, elsewhere."""
    bases = {}

    def copy(y):
        if isinstance(y, tuple):
            return type(y)(*map(copy, y)) if hasattr(y, "_fields") else tuple(map(copy, y))
        if type(y) is not np.ndarray:
            return y
        root = y
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in bases:
            assert root.flags.c_contiguous
            own, low = np.empty(root.nbytes + 64, np.uint8), root.ctypes.data
            own = own[(low - own.ctypes.data) % 64 :][: root.nbytes]
            own[:] = root.reshape(-1).view(np.uint8)
            bases[id(root)] = own, low
        own, low = bases[id(root)]
        z = np.ndarray(y.shape, y.dtype, own.data, y.ctypes.data - low, y.strides)
        z.flags.writeable = y.flags.writeable
        return z

    return {n: copy(y) for n, y in x.items()}


def result(fn, arrays, keywords):
    """All that a call gives or changes, as bytes with their dtype and shape; or its error. It works on copies."""
    own = copied({**{str(n): y for n, y in enumerate(arrays)}, **keywords})
    try:
        found = fn(*(own[str(n)] for n in range(len(arrays))), **{n: own[n] for n in keywords})
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    state = own.get("state")
    identities = [isinstance(found, tuple), *(y is z for y, z in zip(parts(found)[1:], parts(state), strict=False))]
    return identities, [(y.shape, y.dtype, y.tobytes()) for y in (*parts(found), *parts(state))]


def check(fn, remembered, other, count=1):
    """other, after calls like `remembered`. Each is (arrays by position, keywords)."""
    replay.clear()
    expected = result(fn, *other)
    replay.clear()
    result(fn, *remembered)
    assert replay.count() == count
    result(fn, *remembered)  # from memory
    for _ in range(2):  # after the other call; then after itself
        assert result(fn, *other) == expected
    return expected


def of(x, *arrays, **keywords):
    return [x[n] for n in ("q", "k", "v", "g", "beta")] if not arrays else list(arrays), keywords


def transposed(y):
    return np.ascontiguousarray(y.swapaxes(1, 2)).swapaxes(1, 2)


def apart(y, factor=2):
    """The same numbers in memory `factor` times as long, every number but one in that left out."""
    wide = np.zeros((*y.shape[:-1], factor * y.shape[-1]), y.dtype)
    wide[..., ::factor] = y
    return wide[..., ::factor]


def backwards(y):
    return y[:, ::-1].copy()[:, ::-1]


def shared_row(y):
    return np.broadcast_to(y[:1], y.shape)


def frozen(y):
    y = y.copy()
    y.flags.writeable = False
    return y
