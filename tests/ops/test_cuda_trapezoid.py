"""Rotated rows that are written twice (Mamba-3) by CUDA kernels, and their transpose; emulated here, or on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import array_api_compat.numpy as np_namespace
import ml_dtypes
import numpy as np
import pytest

from linattn_np.ops import trapezoid as formulas
from linattn_np.ops.ranks import Heads, Reads, read_out, read_out_vjp, spread, spread_vjp
from linattn_np.ops.trapezoid import Ends, Last, Tokens, Writes, late_writes, late_writes_vjp, settled
from linattn_np.testing import relative_error
from tests.cuda.emulation import device, emulated  # noqa: F401
from tests.ops.test_cuda_running import sequences_of

BF16 = np.dtype(ml_dtypes.bfloat16)
ROUNDED, SUMMED = 16 * 2.0**-23, 64 * 2.0**-23  # of numbers in float32, and of sums of dozens of them


class Case(NamedTuple):
    B: tuple[int, ...] = (2,)
    T: int = 37
    H: int = 2
    Hk: int = 2
    Hq: int = 2
    K: int = 8
    V: int = 8
    P: int = 4
    offsets: tuple[int, ...] | None = None
    begun: bool = True  # with the last token before the first one
    ended: bool = True  # with gradients of the last tokens
    reads: bool = True
    skips: bool = True
    shifts: bool = True  # A of every token
    dtype: np.dtype = np.dtype(np.float32)
    R: int = 1  # of several, the kernels make the values


CASES = [
    Case(),
    Case(T=1),
    Case(T=32, begun=False, ended=False),
    Case(T=33, dtype=BF16),
    Case(B=(), T=100, Hk=1, P=2, ended=False),
    Case(B=(1, 2), T=65, H=4, Hk=2, Hq=1, dtype=BF16),
    Case(K=7, V=5, P=3, skips=False),
    Case(K=6, V=12, P=0, shifts=False, dtype=np.dtype(np.float16)),
    Case(K=40, V=72, P=20, dtype=BF16, T=5),
    Case(B=(1,), T=90, offsets=(0, 40, 40, 41, 90)),
    Case(B=(1,), T=90, offsets=(0, 0, 33, 90, 90), begun=False, dtype=BF16),
    Case(B=(1,), T=130, offsets=(0, 1, 2, 3, 67, 67, 99, 100, 130), dtype=BF16),
    Case(reads=False),
    Case(reads=False, T=3, begun=False, P=0),
    Case(R=2),
    Case(R=2, T=1, ended=False),
    Case(R=4, T=70, B=(1, 2), H=4, Hk=2, Hq=1, K=24, V=40, P=6, dtype=BF16),
    Case(R=3, K=7, V=5, P=3, T=33, skips=False, begun=False, shifts=False),
    Case(R=5, B=(1,), T=90, offsets=(0, 0, 33, 34, 90, 90), dtype=BF16),
    Case(R=4, K=40, V=72, P=0, T=5, B=(), dtype=np.dtype(np.float16)),
    Case(R=2, reads=False, T=34),
]


def drawn(c: Case):
    """(tokens, D, the last ones, (S, cotangents), sequences): float64, of numbers that the dtype has."""
    rng, sequences = np.random.default_rng(0), sequences_of(c.offsets, c.T)

    def normal(*shape, dtype=c.dtype):
        return rng.standard_normal(shape).astype(dtype).astype(np.float64)

    lead, owners = (*c.B, c.T), c.B if c.offsets is None else (len(sequences),)
    dt = rng.uniform(0, 2, (*lead, c.H)).astype(np.float32).astype(np.float64)
    A = -np.exp(normal(*(lead if c.shifts else ()), c.H, dtype=np.float32))
    R, rows = c.R, (*c.B, c.T * c.R)
    x = Tokens(normal(*lead, 1, c.H, c.V), dt, A.astype(np.float32).astype(np.float64), normal(*lead, R, c.Hk, c.K),
               normal(*lead, R, c.Hq, c.K) if c.reads else None, 3 * normal(*lead, c.H, dtype=np.float32),
               normal(*lead, c.H, c.P), normal(c.H, R, c.V, dtype=np.float32) if R > 1 else None)  # fmt: skip
    D = normal(c.H, dtype=np.float32) if c.skips else None
    last = Last(normal(*owners, c.H, R, c.K, dtype=c.dtype), normal(*owners, c.H, R, c.V, dtype=np.float32))
    S = rng.standard_normal((*owners, c.H, c.K, c.V))
    d = SimpleNamespace(q=normal(*rows, c.H, c.K), k=normal(*rows, c.H, c.K), v=normal(*rows, c.H, c.V),
                        g=normal(*rows, c.H, 1, dtype=np.float32))  # fmt: skip
    dout = normal(*rows, c.H, c.V) if c.reads else None
    ends = Ends(*(normal(*owners, c.H, *n, dtype=np.float32) for n in ((R, c.K), (R, c.V), (), (c.P,))))
    return x, D, last if c.begun else None, (S, d, dout, ends if c.ended else None), sequences


def brought(device, x, narrow, names=("x", "B", "C", "angle")):  # noqa: F811
    """Arrays by name: those of `names` in the dtype of rows, the others in float32."""
    each = {n: y if y is None else device.bring(y.astype(narrow if n in names else np.float32))
            for n, y in x._asdict().items()}  # fmt: skip
    return type(x)(**each)


def near(device, found, expected, bound):  # noqa: F811
    assert found.shape == expected.shape
    assert relative_error(device.see(found).astype(np.float64), expected) <= bound


def bound_of(c: Case):
    return {2: 4 if c.dtype == BF16 else 0.5, 4: 2.0**-9}[c.dtype.itemsize] * 2.0**-9


class Found(NamedTuple):
    late: Any
    S: Any
    grads: Any  # (of tokens, of D before its sum, of the last ones)


def computed(device, c: Case) -> Found:  # noqa: F811
    """By the kernels."""
    x, D, last, cotangents, sequences = drawn(c)
    D = None if D is None else device.bring(D.astype(np.float32))
    how = Writes(device.xp, sequences, 0.7, D, np.dtype("f4"))
    rows, past = brought(device, x, c.dtype), None if last is None else brought(device, last, np.float32)
    S, d, dout, ends = cotangents
    found = late_writes(how, rows, past)
    end = settled(device.xp, device.bring(S.astype(np.float32)), found, np.dtype("f4"))
    d = SimpleNamespace(**{n: device.bring(y.astype(np.float32 if n == "g" else c.dtype)) for n, y in vars(d).items()})
    dout = None if dout is None else device.bring(dout.astype(c.dtype))
    ends = None if ends is None else Ends(*map(device.bring, ends))
    dlater = None
    if c.R > 1 and c.reads:
        dlater = device.bring(pairs(device.see(dout), device.see(found.v), c.R).astype(np.float32))
    return Found(found, end, late_writes_vjp(how, rows, past, found if c.R > 1 else None, d, dout, ends, dlater))


def pairs(x, y, R):
    """x_r . y_s of the rows of tokens (..., T R, H, D): (..., T, H, R, R) in float64."""
    x, y = (np.moveaxis(formulas.in_ranks(np_namespace, z.astype(np.float64), R), -3, -2) for z in (x, y))
    return x @ y.swapaxes(-1, -2)


def expected(device, c: Case, rows: Any) -> Found:  # noqa: F811
    """By the recurrence in float64, on the numbers that were rounded to the dtype of the rows.

    rows: q and k as the core reads them, rounded: gradients of angles are those of these rows.
    """
    x, D, last, (S, *cotangents), sequences = drawn(c)
    how = Writes(np_namespace, sequences, 0.7, D, np.float64)
    x, one = x._replace(m=None, x=x.x if x.m is None else spread(np_namespace, x.x[..., 0, :, :], x.m, np.float64)), x
    late = late_writes(how, x, last)
    seen = [None if y is None else device.see(y).astype(np.float64) for y in (rows.k, rows.q, rows.v)]
    stored = [None if y is None else formulas.in_ranks(np_namespace, y, c.R) for y in seen]
    if late.later is not None:
        late = late._replace(later=0.7 * np.triu(pairs(seen[1], seen[0], c.R), 1))
    read = late._replace(k=seen[0], q=seen[1], v=seen[2])
    turned = iter((np.roll(stored[0], -1, axis=-4), stored[1]))  # of B and of C
    array_calls = {"_kernels": lambda *_: None, "_rotated": lambda *_: next(turned)}
    with patch.multiple(formulas, **array_calls):
        grads = late_writes_vjp(how, x, last, read, *cotangents)
    if one.m is not None:
        dx, dm = spread_vjp(np_namespace, one.x[..., 0, :, :], one.m, grads[0].x)
        grads = (grads[0]._replace(x=dx[..., None, :, :], m=dm), *grads[1:])
    return Found(late, settled(np_namespace, S, late, np.float64), grads)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_rows_and_their_gradients(device, c):  # noqa: F811
    found, bound = computed(device, c), bound_of(c)
    exact = expected(device, c, found.late)
    for name, y in exact.late._asdict().items():
        z = getattr(found.late, name)
        assert (z is None) == (y is None), name
        if name == "last":
            for one, other in zip(z, y, strict=True):  # values of several rows are products
                near(device, one, other, 0 if c.R == 1 else 2.0**-23)
        elif y is not None:
            assert name not in ("q", "k", "v") or z.dtype == c.dtype
            near(device, z, y, bound if name in ("q", "k", "v") else ROUNDED)
    near(device, found.S, exact.S, ROUNDED)
    for name, y in exact.grads[0]._asdict().items():
        z = getattr(found.grads[0], name)
        assert (z is None) == (y is None), name
        if y is not None:
            near(device, z, y, bound if name in ("x", "B", "C", "angle", "m") else SUMMED)
    if c.reads:
        near(device, found.grads[1], exact.grads[1], SUMMED)
    for y, z in zip(found.grads[2] or (), exact.grads[2] or (), strict=True):
        near(device, y, z, bound)


def test_an_angle_depends_on_no_later_token(device):  # noqa: F811
    """Bits of tokens are those of a shorter call, and of a sequence among others."""
    c = Case(B=(1,), T=150, begun=False, dtype=BF16)
    x = drawn(c)[0]
    on = Writes(device.xp, sequences_of(None, 150), 1.0, None, np.dtype("f4"))
    rows = brought(device, x, c.dtype)
    whole = late_writes(on, rows, None)
    cut = Tokens(*(y if n == "m" or (n == "A" and not c.shifts) else device.bring(device.see(y)[:, :70])
                   for n, y in rows._asdict().items()))  # fmt: skip
    short = late_writes(on._replace(sequences=sequences_of(None, 70)), cut, None)
    packed = late_writes(on._replace(sequences=sequences_of((0, 70, 150), 150)), rows, None)
    for name in ("q", "k", "v", "g", "shares"):
        for other in (short, packed):
            y, z = (device.see(getattr(one, name))[:, :70] for one in (other, whole))
            assert y.tobytes() == z.tobytes()


def test_nan_stays_in_its_head_and_sequence(device):  # noqa: F811
    c = Case(T=40, begun=False)
    x, *_, sequences = drawn(c)
    for name in ("angle", "dt", "B"):
        y = getattr(x, name).copy()
        y[(0, 3, 0, 0) if name == "B" else (0, 3, 0)] = np.nan
        rows = brought(device, x._replace(**{name: y}), c.dtype)
        found = late_writes(Writes(device.xp, sequences, 1.0, None, np.dtype("f4")), rows, None)
        for part in ("q", "k", "v", "shares"):
            bad = np.isnan(device.see(getattr(found, part)))
            assert not bad[1].any()
            assert not bad[0, :, 1].any()
            assert not bad[0, :3].any()
        assert np.isnan(device.see(found.q if name == "angle" else found.k)[0, 4:, 0]).any()


class Rows(NamedTuple):
    B: tuple[int, ...] = (2,)
    T: int = 37
    H: int = 2
    V: int = 8
    R: int = 2
    gated: bool = True
    gates: bool = True  # with vectors of the gates
    dtype: np.dtype = np.dtype(np.float32)


READ = [
    Rows(),
    Rows(gates=False, R=3, T=1),
    Rows(gated=False, R=1, V=5),
    Rows(B=(), T=300, R=4, V=40, dtype=BF16),
    Rows(B=(3, 1), R=5, V=24, dtype=np.dtype(np.float16)),
    Rows(R=1, V=72, dtype=BF16),
]


def read_rows(device, c: Rows):  # noqa: F811
    """(arrays: out, later, late, shares, x, z, m, gates, outs, dy; what the kernels make of them)."""
    rng, lead = np.random.default_rng(0), (*c.B, c.T)

    def normal(*shape, dtype=c.dtype):
        return rng.standard_normal(shape).astype(dtype)

    f32, rows, pair = np.float32, (*c.B, c.T * c.R, c.H, c.V), (*lead, c.H, c.R, c.R)
    both = normal(*lead, c.H, 2 * c.V)
    x, z, m = both[..., : c.V], both[..., c.V :], [normal(c.H, c.R, c.V, dtype=f32) for _ in range(3)]
    out, late, dy = normal(*rows), normal(*rows), normal(*lead, c.H, c.V)
    shares, later = normal(*pair, dtype=f32), np.triu(normal(*pair, dtype=f32), 1) if c.R > 1 else None
    there = device.bring(both)
    given = Reads(*(None if y is None else device.bring(y) for y in (out, later, late, shares)),
                  there[..., None, :, : c.V], device.bring(m[0]))  # fmt: skip
    heads = Heads(there[..., c.V :] if c.gated else None, device.bring(m[1]) if c.gates else None, device.bring(m[2]))
    y = read_out(device.xp, given, heads, f32)
    return (out, later, late, shares, x, z, *m, dy), (
        y, *read_out_vjp(device.xp, given, heads, device.bring(dy), f32))  # fmt: skip


@pytest.mark.parametrize("c", READ, ids=str)
def test_rows_of_tokens_become_an_output(device, c):  # noqa: F811
    """And the transpose, on strided values and gates."""
    arrays, (y, du, grads, dlater) = read_rows(device, c)
    wide = [None if y is None else y.astype(np.float64) for y in arrays]
    exact = Reads(*wide[:4], spread(np_namespace, wide[4], wide[6], np.float64))
    wide_heads = Heads(wide[5] if c.gated else None, wide[7] if c.gates else None, wide[8])
    bound = bound_of(c)
    near(device, y, read_out(np_namespace, exact, wide_heads, np.float64), bound)
    wide_du, wide_grads, _ = read_out_vjp(np_namespace, exact, wide_heads, wide[9], np.float64)
    assert du.dtype == c.dtype
    near(device, du, wide_du, bound)
    for one, other in zip(grads, wide_grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            near(device, one, other, bound)
    assert (dlater is None) == (c.R == 1)
    if dlater is not None:
        expected, upper = pairs(device.see(du), arrays[2], c.R), np.triu(np.ones((c.R, c.R), bool), 1)
        assert relative_error(device.see(dlater)[..., upper], expected[..., upper]) <= SUMMED
