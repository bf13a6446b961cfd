"""Weights that are a polynomial of the logits, in place of their exponentials, on CuPy arrays by the core's kernels.

    w_ij = c_0 + c_1 z_ij + c_2 z_ij^2, z = q_i . k_j;  out_i = sum_j w_ij v_j / (sum_j w_ij + eps)

plan.normalize False: without the denominator. plan.scale is 1.
"""

from __future__ import annotations

from typing import Any

from ...runtime.arrays import Array
from .. import core, policy
from ..types import Inputs, SoftmaxPlan


def unsupported_reason(x: Inputs, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    from ..cuda import calls

    return "the portable kernels are asked for" if policy.PORTABLE else calls.unsupported_reason(x, plan)


def forward(plan: SoftmaxPlan, x: Inputs) -> tuple[Array, Any]:
    """(out, what backward needs besides)."""
    from ..cuda import calls

    return calls.forward(plan, x)


def backward(plan: SoftmaxPlan, x: Inputs, out: Array, saved: Any, dout: Array) -> Inputs:
    """Gradients of the inputs."""
    from ..cuda import calls

    return calls.backward(plan, x, out, saved, dout)


def pairs(plan: SoftmaxPlan, x: Inputs) -> tuple[int, int]:
    """(pairs of a query and a key that it reads, of one head; tokens of a tile)."""
    return core.pairs(plan, x.q.shape[-3]), policy.CUDA_TILE
