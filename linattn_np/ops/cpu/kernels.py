"""The kernels of all pieces of layers by purpose: what warmup compiles ahead."""

from __future__ import annotations

from typing import Any

from . import (
    activations,
    conv_states,
    gated_norm,
    linear,
    pairs,
    row_norms,
    running,
    scatter,
    short_conv,
    softmax_rows,
    sums,
)

FUNCTIONS = ("sigmoid", "silu", "softplus", "log_sigmoid", "gelu", "gelu_tanh", "squared_relu")
WIDTHS = 2, 3, 4  # of convolutions; others are compiled by their first call


def groups() -> dict[str, tuple[tuple[Any, ...], str]]:
    """(kernels, no words of calls)."""
    each: dict[str, tuple[Any, ...]] = {
        "activations": tuple(kernel for name in FUNCTIONS for kernel in getattr(activations, name).kernels),
        "swiglu": (activations.swiglu_forward, activations.swiglu_backward),
        "norms": (row_norms.norm, row_norms.norm_vjp),
        "norms with a gate": (gated_norm.normed, gated_norm.normed_vjp),
        "softmax of rows": (softmax_rows.forward, softmax_rows.backward),
        "cross-entropy": (softmax_rows.losses, softmax_rows.total, softmax_rows.slopes),
        "rotations": (pairs.rotated, pairs.angles, running.running),
        "embeddings": (scatter.gathered, scatter.added),
        "dense layers": (linear.forward, linear.transposes, linear.backward, linear.gradients),
        "sums": (sums.summed,),
        "final states": (conv_states.ended, conv_states.ended_vjp),
    }
    each |= {f"short convolutions of width {W}": tuple(short_conv.kernels(W)) for W in WIDTHS}
    return {purpose: (kernels, "") for purpose, kernels in each.items()}
