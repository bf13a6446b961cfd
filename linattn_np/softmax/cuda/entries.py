"""Kernels of the softmax core, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ...runtime.cuda.elements import BYTES, ELEMENTS
from ...runtime.cuda.entries import SHARED, Entry
from .. import policy
from . import path_plan, plan, portable_plan, stick_plan, system_plan
from .portable_plan import PortableKind


def every_entry(dtype: str, K: int, V: int, capability: int, decay: bool, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of the core's functions for key width K and value width V; decay: of functions with log decays."""
    for of in (softmax_entries, portable_entries, system_entries, stick_entries):
        yield from of(dtype, K, V, capability, decay, backward)
    yield from path_entries(dtype, K, V, capability, decay)


def softmax_entries(dtype: str, K: int, V: int, capability: int, decay: bool, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of softmax attention; decay: of attention with log decays. None where they are not for it."""
    kind = plan.SoftmaxKind(dtype, -(-K // 8) * 8, -(-V // 8) * 8, decay)
    if not plan.takes(dtype, kind.K, kind.V, capability):
        return
    names = ("decays", "norms", "forward")[2 * (not decay) :]
    names += ("dots", "backward", "dq", "gates")[: 3 + decay] * backward
    for name in names:
        words = f"softmax attention{' with decays' * decay}, {name}"
        yield Entry(words, plan.KERNELS[name].file, plan.constants(name, kind))
    for name in ("forward", "backward")[: 1 + backward] if dtype == "bfloat16" and not decay else ():
        constants = plan.constants(name, kind._replace(polynomial=True))
        yield Entry(f"polynomials of logits, {name}", plan.KERNELS[name].file, constants)


def path_entries(dtype: str, K: int, V: int, capability: int, decay: bool) -> Iterator[Entry]:
    """Every kernel of PaTH attention but the kernels of gates; none on other devices or dtypes."""
    kind = plan.SoftmaxKind(dtype, -(-K // 8) * 8, -(-V // 8) * 8, decay)
    if dtype == "bfloat16" and plan.takes(dtype, kind.K, kind.V, capability):
        for name, kernel in path_plan.KERNELS.items():
            yield Entry(f"PaTH attention{' with decays' * decay}, {name}", kernel.file, path_plan.constants(name, kind))


def portable_entries(
    dtype: str, K: int, V: int, capability: int, decay: bool, backward: bool = True
) -> Iterator[Entry]:
    """Every kernel where no others are, of a cache of the same dtype, and the gradient of sinks."""
    if dtype not in ELEMENTS or max(K, V) > policy.WIDEST_PORTABLE:
        return
    kind, limit = _kind(dtype, K, V, decay), SHARED[capability] * 1024
    found = [(kind._replace(cache=dtype), name, 0) for name in ("forward", "pieces", "cache")]
    if not plan.takes(dtype, -(-K // 8) * 8, -(-V // 8) * 8, capability):
        found += [(kind, "forward", 0)]
        found += [(kind, "queries", 0), *((kind, "keys", done) for done in portable_plan.passes(kind))] * backward
    for own, name, done in found:
        words = f"softmax attention{' with decays' * decay}{' and a cache' * bool(own.cache)}, portable, {name}"
        yield Entry(words, portable_plan.KERNELS[name].file, portable_plan.constants(name, own, limit, done))
    if backward and not decay:
        yield Entry("softmax attention, sinks", plan.KERNELS["sinks"].file, ())


def system_entries(dtype: str, K: int, V: int, capability: int, decay: bool, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of deltaformer that softmax attention does not have."""
    if dtype not in ELEMENTS or max(K, V) > policy.WIDEST_PORTABLE:
        return
    kind, limit, words = _kind(dtype, K, V, decay), SHARED[capability] * 1024, f"deltaformer{' with decays' * decay}"
    for name in ("forward", "backward")[: 1 + backward]:
        yield Entry(f"{words}, {name}", system_plan.KERNELS[name].file, system_plan.constants(name, kind, limit))
    for name, done in (("queries", 0), ("keys", 2)) if backward else ():
        constants = portable_plan.constants(name, kind, limit, done)
        yield Entry(f"{words}, {name}", portable_plan.KERNELS[name].file, constants)


def stick_entries(
    dtype: str, K: int, V: int, capability: int, decay: bool = False, backward: bool = True
) -> Iterator[Entry]:
    """Every kernel of stick-breaking attention, which has no log decays."""
    if dtype not in ELEMENTS or max(K, V) > policy.WIDEST_PORTABLE or decay:
        return
    kind, limit = _kind(dtype, K, V, False), SHARED[capability] * 1024
    found = [("forward", 0), *[("queries", 0), *(("keys", done) for done in portable_plan.passes(kind))] * backward]
    for name, done in found:
        constants = stick_plan.constants(name, kind, limit, done)
        yield Entry(f"stick-breaking attention, {name}", stick_plan.KERNELS[name].file, constants)


def _kind(dtype: str, K: int, V: int, decay: bool) -> PortableKind:
    return PortableKind(dtype, K, V, decay, gcd(16, K * BYTES[dtype], V * BYTES[dtype]))
