"""Kernels around a core, to be compiled ahead: l2 norms, gate formulas, keys of log decays, step sizes."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from ...runtime.cuda.elements import BYTES, ELEMENTS
from ...runtime.cuda.entries import Entry
from ..map_steps import monomials as steps_of
from ..polynomial_maps import taylor_coefficients
from . import complement, features, gate_formula, join, monomials, optimisers, product, step_size, sums, unit_rows


def raw_entries(dtype: str, K: int) -> Iterator[Entry]:
    """The kernels of raw projections: l2 norms of rows of K, and the gate formula."""
    per = gcd(16 // BYTES[dtype], K)
    yield Entry("l2 norms", unit_rows.SOURCE, unit_rows.row_constants(dtype, dtype, K, per))
    yield Entry("gate formula", gate_formula.SOURCE, (("LA_DTYPE", ELEMENTS[dtype]),))


def feature_entries(dtype: str, K: int) -> Iterator[Entry]:
    """The kernels of random features of rows of K channels, and of Taylor polynomials of the second degree."""
    if dtype == "bfloat16" and K % 8 == 0 and K <= features.WIDEST:
        for kind, tile in (("exponentials", features.TILE), ("waves", features.NARROW_TILE)):
            yield Entry(f"{kind} of rows", features.SOURCE, features.constants(kind, K, tile))
        steps = steps_of(taylor_coefficients(2))
        if steps is not None and monomials.takes(steps, K):
            build = monomials.constants(steps, K, features.width(steps, K))
            yield Entry("monomials of rows", monomials.SOURCE, build)


def key_entries(dtype: str) -> Iterator[Entry]:
    """The kernels of keys 1 - e^g (hgrn2)."""
    for gate in dict.fromkeys((dtype, "float32")):
        yield Entry(f"keys of log decays in {gate}", complement.SOURCE, complement.constants(gate, dtype))


def product_entries(dtype: str) -> Iterator[Entry]:
    """The kernel of elementwise products (gdn2)."""
    if dtype == "bfloat16":
        yield Entry("products of gates", product.SOURCE, product.constants(dtype))


def optimiser_entries(dtype: str) -> Iterator[Entry]:
    """The kernels of AdamW for parameters of a dtype, whose gradients have it too, or are sums in float32."""
    if dtype in optimisers.KINDS:
        for grad in dict.fromkeys((dtype, "float32" if dtype != "float64" else dtype)):
            yield Entry(f"optimiser, gradients in {grad}", optimisers.SOURCE, optimisers.constants(dtype, grad))
        yield Entry("gradients as a vector", join.SOURCE, join.constants(dtype))


def step_size_entries(dtype: str, V: int) -> Iterator[Entry]:
    """The kernels of Mamba-2's step size and output gate for value width V."""
    yield Entry("step size", step_size.SOURCE, step_size.step_constants(dtype, dtype, V))
    yield Entry("sums over tokens", sums.SOURCE, sums.constants("float32"))
