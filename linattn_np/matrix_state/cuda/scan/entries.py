"""Kernels of scalar decays, and of the delta rule with them, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ....runtime.cuda.elements import BYTES
from ....runtime.cuda.entries import SHARED, Entry
from ... import policy
from .. import operands
from . import launch as scan_launch
from . import normaliser, plan, wgmma


def scan_entries(
    dtype: str, K: int, V: int, capability: int, decay: bool = True, backward: bool = True
) -> Iterator[Entry]:
    """Every kernel of forward, and of backward, for key width K and value width V."""
    limit = SHARED[capability] * 1024
    align = gcd(16, K * BYTES[dtype], V * BYTES[dtype])
    own = wgmma.takes(dtype, K, V, align, capability)

    def scan(words: str, K: int, V: int, reverse: bool = False, outputs: bool = True, dots: bool = False) -> Entry:
        if own:
            how = wgmma.scan_pass(K, V, decay, reverse, outputs, dots)
        else:
            how = plan.scan_pass(plan.ScanKind(dtype, K, V, align, decay, reverse, outputs, dots), limit)
        return Entry(words, how.file, how.constants)

    def small(words: str, file: str, reverse: bool = False) -> Entry:
        chunk = policy.GROUP_CHUNK if own else policy.SCAN_CHUNK
        return Entry(words, file, plan.common_constants(dtype, decay, reverse, chunk))

    yield scan("out", K, V)
    yield scan("segment offset of the state", K, V, outputs=False)
    yield small("states of segments", scan_launch.SEGMENTS)
    if backward:
        if own and wgmma.takes_writes(K, V):
            yield Entry("dk, dv", wgmma.WRITES, wgmma.writes_pass(K, V, decay, decay).constants)
        else:
            yield scan("dv", K, V, reverse=True)
            yield scan("dk", V, K, reverse=True, dots=decay)
        yield scan("dq", V, K, dots=decay)
        yield scan("segment offset of dstate", K, V, reverse=True, outputs=False)
        yield small("dstates of segments", scan_launch.SEGMENTS, reverse=True)
        if decay:
            yield small("dg", scan_launch.GATE)
        if dtype == "bfloat16" and K % 8 == 0:
            yield Entry("sums over grouped heads", operands.HEAD_SUMS, ())


def normaliser_entries(dtype: str, K: int, V: int, decay: bool = False, backward: bool = True) -> Iterator[Entry]:
    """The kernels of sums of weights for keys of K channels, and of quotients of rows of V columns."""
    element, names = ("bfloat16" if dtype == "bfloat16" else "float32"), ["sums of weights"]
    wide = K % 4 == 0, V % 4 == 0
    for name in names + ["gradients of sums of weights"] * backward:
        build = normaliser.constants(element, K, decay, wide[0], name not in names)
        yield Entry(name, normaliser.SUMS, build)
    yield Entry("quotients", normaliser.QUOTIENT, normaliser.row_constants(element, V, wide[1]))
