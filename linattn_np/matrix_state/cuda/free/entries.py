"""Kernels of erase vectors of their own, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ....ops.cuda.entries import product_entries
from ....runtime.cuda.entries import Entry
from ..vector import plan as vector_plan
from . import delta, plan


def free_entries(
    dtype: str, K: int, V: int, capability: int, backward: bool = True, ragged: bool = False
) -> Iterator[Entry]:
    """Every kernel of erase FREE with a vector decay or none; none where they are not for it."""
    if not vector_plan.takes(dtype, K, V, capability):
        return
    Build = plan.Build
    wanted = [(plan.FACTORS, Build()), (plan.FACTORS, Build(exact=True)), (plan.CHAIN, Build())]
    for back in (False, True)[: 2 * backward]:
        wanted += [(plan.FACTORS, Build(exact, True, True)) for exact in (False, True) if back]
        wanted += [(plan.CHAIN, Build(False, back, True))]
    wanted += [(plan.GRADS, Build()), (plan.EXACT_GRADS, Build())] if backward else []
    for gate in ("bfloat16", "float32"):
        for name, build in wanted:
            words = f"{'exact ' * build.exact}{name}{' for a backward' * build.keep}{', reversed' * build.backward}"
            constants = plan.constants(name, plan.FreeKind(K, V, gate, ragged), build)
            yield Entry(f"free rank-one term in {gate}, {words}", plan.KERNELS[name].file, constants)


def erase_vector_entries(dtype: str, K: int, V: int, capability: int, backward: bool = True) -> Iterator[Entry]:
    """Every kernel of the delta rule with a vector decay and erase vectors of its own (gdn2)."""
    yield from free_entries(dtype, K, V, capability, backward)
    for gate in ("bfloat16", "float32") if vector_plan.takes(dtype, K, V, capability) else ():
        constants = delta.constants(K, V, gate, "bfloat16", False)
        yield Entry(f"erase vectors with a decay in {gate}", delta.SOURCE, constants)
    yield from product_entries(dtype)
