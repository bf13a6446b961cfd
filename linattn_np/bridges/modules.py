"""What stands around the recurrence in FLA's layers, for torch tensors: norms with a gate, the short convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import nn as pieces
from ..ops.gated_norm import GatedNorm, check_how
from ..runtime.doorway import WHOLE, expect, expect_whole
from ..runtime.shapes import check_offsets
from ..runtime.values import is_word, shown
from . import torch as _  # noqa: F401  # here, since torch.compile cannot trace the import in a first call

Tensor = torch.Tensor
GATES = ("swish", "silu", "sigmoid")


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps), in float32 or wider; the sum is in range for every x."""
    dtype = output_dtype or x.dtype
    return pieces.l2_norm(x.to(torch.promote_types(x.dtype, dtype)), eps=eps).to(dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNorm, fn: str = "gated_rms_norm"
) -> Tensor:
    """norm(x) weight act(gate), or with the gate before norm(x act(gate)) weight: la.nn.gated_norm.

    x, gate (..., D), weight (D,). Raises TypeError or ValueError, naming fn, for tensors that do not fit.
    """
    how = how._replace(activation="silu") if how.activation == "swish" else how
    check_how(fn, how, expect(fn, x=(x, "... D"), gate=(gate, "... D"), weight=(weight, "D?"))["D"])
    return pieces.gated_norm(x, gate, weight, **how._asdict())


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    *,
    eps: float = 1e-6,
    **unsupported: Any,
) -> Tensor:
    """FLA's function without residual and prenorm."""
    for name, given in ({"bias": bias} | unsupported).items():
        if given is not None and given is not False:
            raise ValueError(f"rms_norm_gated: {name} is not supported, expected None or False")
    if not is_word(activation, GATES):
        raise ValueError(f"rms_norm_gated: activation is {shown(activation)}, expected one of {', '.join(GATES)}")
    return gated_rms_norm(x, g, weight, GatedNorm(eps, activation), "rms_norm_gated")


class FusedRMSNormGated(nn.Module):
    """FLA's module: norm(x) weight act(g), eps = 1e-5."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 activation: str = "swish", device: Any = None, dtype: Any = None) -> None:  # fmt: skip
        super().__init__()
        if not is_word(activation, GATES):
            raise ValueError(
                f"FusedRMSNormGated: activation is {shown(activation)}, expected one of {', '.join(GATES)}"
            )
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor, g: Tensor, residual: Any = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor:  # fmt: skip
        more = {"residual": residual, "prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        weight: Any = self.weight
        return rms_norm_gated(x, g, weight, None, self.activation, eps=self.eps, **more)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    **unsupported: Any,
) -> tuple[Tensor, Tensor | None]:
    """FLA's function of x (B, T, D), weight (D, W), bias (D,) -> (y, the final state or None); cu_seqlens over one row.

    A state is the last W inputs of each sequence, (N, D, W): N = B, or the sequences of cu_seqlens. Without an initial
    state they are zeros. Raises TypeError or ValueError for tensors that do not fit.
    """
    fn = "causal_conv1d"
    for name, given in unsupported.items():
        if given is not None and given is not False and name not in ("backend", "cu_seqlens_cpu", "chunk_indices"):
            raise ValueError(f"{fn}: {name} is not supported, expected None or False")
    sizes = expect(fn, x=(x, "B T D"), residual=(residual, "B T D?"), weight=(weight, "D W"), bias=(bias, "D?"))
    expect_whole(fn, "W of weight", sizes["W"])
    if cu_seqlens is not None:
        expect(fn, {}, WHOLE, cu_seqlens=(cu_seqlens, "N"))
        if not torch.compiler.is_compiling():  # a graph cannot look at numbers
            check_offsets(fn, cu_seqlens, {"...": (sizes["B"],), "T": sizes["T"]})
    sizes["N"] = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expect(fn, sizes, initial_state=(initial_state, "N D W?"))
    y, end = convolve(x, (weight, bias, activation), initial_state, cu_seqlens, output_final_state)
    return y if residual is None else y + residual, end


def convolve(
    x: Tensor, conv: tuple[Tensor, Tensor | None, str | None], state: Tensor | None, offsets: Tensor | None, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, the last W inputs of each sequence if `ends`) of x (B, T, D); state (N, D, W).   conv: weight, bias, act."""
    (weight, bias, activation), (B, _T, D), W = conv, x.shape, conv[0].shape[-1]
    if state is None and ends:
        state = x.new_zeros(B if offsets is None else offsets.shape[0] - 1, D, W)
    state = None if state is None else state.to(x.dtype).transpose(1, 2)
    found = pieces.short_conv(x, weight, bias, state=state, activation=activation, cu_seqlens=offsets,
                              return_state=ends)  # fmt: skip
    return (found.out, found.state.transpose(1, 2)) if ends else (found, None)
