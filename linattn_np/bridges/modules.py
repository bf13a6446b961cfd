"""What stands around the recurrence in FLA's layers, for torch tensors: norms with a gate, the short convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .causal_conv1d import causal_conv1d_fn
from .packed import sequence_numbers

Tensor = torch.Tensor
GATES: dict[str, Any] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps), in float32 or wider."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str = "silu", gate_first: bool = False,
    group: int | None = None,
) -> Tensor:
    """norm(x) weight act(gate), or with gate_first norm(x act(gate)) weight; by torch's kernels."""
    y, act = widened(x), GATES[activation](widened(gate))
    y = y * act if gate_first else y
    y = F.rms_norm(y.unflatten(-1, (-1, group or y.shape[-1])), (group or y.shape[-1],), None, eps).flatten(-2)
    y = y if weight is None else y * weight
    return (y if gate_first else y * act).to(x.dtype)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None = None, activation: str = "swish", *,
    eps: float = 1e-6, **unsupported: Any,
) -> Tensor:
    """FLA's function without residual and prenorm."""
    for name, given in ({"bias": bias} | unsupported).items():
        if given is not None and given is not False:
            raise ValueError(f"rms_norm_gated: {name} is not supported, expected None or False")
    if activation not in GATES:
        raise ValueError(f"rms_norm_gated: activation is {activation!r}, expected one of {', '.join(GATES)}")
    return gated_rms_norm(x, g, weight, eps, activation)


class FusedRMSNormGated(nn.Module):
    """FLA's module: norm(x) weight act(g), eps = 1e-5."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5,
                 activation: str = "swish", device: Any = None, dtype: Any = None) -> None:  # fmt: skip
        super().__init__()
        if activation not in GATES:
            raise ValueError(f"FusedRMSNormGated: activation is {activation!r}, expected one of {', '.join(GATES)}")
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor, g: Tensor, residual: Any = None, prenorm: bool = False,
                residual_in_fp32: bool = False) -> Tensor:  # fmt: skip
        more = {"residual": residual, "prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        weight: Any = self.weight
        return rms_norm_gated(x, g, weight, None, self.activation, eps=self.eps, **more)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    activation: str | None = None, cu_seqlens: Tensor | None = None, **unsupported: Any,
) -> tuple[Tensor, None]:
    """FLA's function of x (B, T, D), without states."""
    for name, given in unsupported.items():
        if given is not None and given is not False and name != "backend":
            raise ValueError(f"causal_conv1d: {name} is not supported, expected None or False")
    seq_idx = None if cu_seqlens is None else sequence_numbers(cu_seqlens, x.shape[1])
    y = causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx, activation=activation).transpose(1, 2)
    return (y if residual is None else y + residual), None


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
