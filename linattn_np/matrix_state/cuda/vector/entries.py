"""Kernels of vector decays, to be compiled ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ....runtime.cuda.entries import Entry
from ...types import Erase
from ..delta import plan as delta_plan
from . import plan as vector_plan


def vector_entries(
    dtype: str,
    K: int,
    V: int,
    capability: int,
    erase: Erase = Erase.NONE,
    bonus: bool = False,
    ragged: bool = False,
    backward: bool = False,
) -> Iterator[Entry]:
    """Every kernel of a vector decay for key width K and value width V; none where they are not for it.

    bonus: queries read before the write, with a bonus of their own token's. ragged: packed sequences.
    backward: also the kernels of a forward that stores residuals.
    """
    if not vector_plan.takes(dtype, K, V, capability):
        return
    plain, exact, stored, bounded = (vector_plan.Build(), vector_plan.Build(exact=True), vector_plan.Build(keep=True),
                                     vector_plan.Build(bounded=True))  # fmt: skip
    builds = {"scan": plain, "exact scan": exact, "adds": plain, "segments": plain, "scan of bounded gates": bounded}
    if erase is Erase.DELTA:
        builds = {"inverse": plain, "inverse of segments": stored, "chain": plain, "transfers": plain}
    if backward:
        builds |= {f"{words} for a backward": build._replace(keep=True, two_term_keys=words != "chain")
                   for words, build in builds.items() if "scan" in words or words == "chain"}  # fmt: skip
    for gate, (words, build) in itertools.product(("bfloat16", "float32"), builds.items()):
        if not (build.bounded and bonus):
            name, kind = words.split()[build.exact], vector_plan.VectorKind(K, V, gate, bonus, bonus, ragged)
            constants = vector_plan.constants(name, kind, build)
            yield Entry(f"vector decay in {gate}, {words}", vector_plan.KERNELS[name].file, constants)
    if erase is Erase.DELTA:
        constants = delta_plan.constants("segments", K, V, True)
        yield Entry("vector decay, states of segments", delta_plan.SEGMENTS, constants)


def vector_backward_entries(
    dtype: str, K: int, V: int, capability: int, erase: Erase = Erase.NONE, bonus: bool = False
) -> Iterator[Entry]:
    """Every kernel of the backward of a vector decay; none where they are not for it."""
    if not vector_plan.takes(dtype, K, V, capability):
        return
    plan, delta = vector_plan, erase is Erase.DELTA
    for gate in ("bfloat16", "float32"):
        kind = vector_plan.VectorKind(K, V, gate, bonus, bonus)
        how = [(f"reverse{' of segments' * adds}", plan.REVERSE, plan.reverse_constants(kind, delta, adds))
               for adds in (False, True)]  # fmt: skip
        how += [(f"{'exact ' * exact}gradients{' with keys of log decays' * one.complement}", plan.GRADS,
                 plan.grads_constants(one, delta, exact)) for exact in (False, True)
                for one in (kind, kind._replace(complement=True))[: 2 - (delta or bonus)]]  # fmt: skip
        how += [] if delta or bonus else [("queries", plan.GRADS, plan.grads_constants(kind, dq="float32"))]
        how += [("strengths", plan.STRENGTHS, plan.small_constants(kind, True))] if delta else []
        how += [("bonus", plan.BONUS, plan.small_constants(kind, False))] if bonus else []
        yield from (Entry(f"vector decay in {gate}, {words}", kernel.file, build) for words, kernel, build in how)
