"""What stands around the recurrence in FLA's layers, for torch tensors: norms with a gate, the short convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.cpu import gated_norm as compiled
from ..ops.gated_norm import GatedNorm, GatedNormGrads, check_how
from ..runtime.doorway import WHOLE, expect, expect_whole
from ..runtime.shapes import Sizes, check_offsets
from ..runtime.values import is_word, shown
from .causal_conv1d import causal_conv1d_fn
from .packed import sequence_numbers
from .torch.pieces import FLOATS, Loops, Piece

Tensor = torch.Tensor
GATES: dict[str, Any] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum x^2 + eps), in float32 or wider; the sum is in range for every x."""
    dtype, single, root = output_dtype or x.dtype, x.dtype != torch.float64, eps**0.5
    if not single and x.shape[-1]:  # a power of 2 near the largest entry
        largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=root)
        factor = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent)
        x, root = x * factor, factor * root
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64).square() + root**2
    over = square.rsqrt()
    return (x * (over.float() if single else over)).to(dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, how: GatedNorm, fn: str = "gated_rms_norm"
) -> Tensor:
    """norm(x) weight act(gate), or with the gate before norm(x act(gate)) weight: ops/gated_norm.py says it.

    x, gate (..., D), weight (D,). float32 and float64 on a CPU by compiled loops, else by torch in float32.
    Raises TypeError or ValueError, naming fn, for tensors that do not fit.
    """
    how = how._replace(activation="silu") if how.activation == "swish" else how
    check_how(fn, how, expect(fn, x=(x, "... D"), gate=(gate, "... D"), weight=(weight, "D?"))["D"])
    weight = weight.to(x.dtype) if weight is not None and x.dtype in FLOATS else weight
    return normed(x=x, gate=gate, weight=weight, **how._asdict())


def by_torch(x: Tensor, gate: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    how = GatedNorm(**options)
    y, act = widened(x), GATES[how.activation](widened(gate))
    y = y * act if how.gate_first else y
    group = how.group or y.shape[-1]
    y = F.rms_norm(y.unflatten(-1, (-1, group)), (group,), None, how.eps).flatten(-2)
    y = y if weight is None else y * weight
    return (y if how.gate_first else y * act).to(x.dtype)


def by_loops(x: Any, gate: Any, weight: Any, *how: Any) -> Any:
    return compiled.gated_rms_norm(x, gate, weight, GatedNorm(*how))


def by_loops_vjp(x: Any, gate: Any, weight: Any, *how_and_dy: Any) -> Any:
    *how, dy = how_and_dy
    return compiled.gated_rms_norm_vjp(x, gate, weight, GatedNorm(*how), dy)


normed = Piece(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, str activation, bool gate_first, int? group)",
    GatedNormGrads._fields, Loops(by_loops, by_loops_vjp), by_torch)  # fmt: skip


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
            check_offsets(fn, cu_seqlens, Sizes((sizes["B"],), {"T": sizes["T"]}))
    sizes["N"] = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expect(fn, sizes, initial_state=(initial_state, "N D W?"))
    y, end = convolve(x.transpose(1, 2), (weight, bias, activation), initial_state, cu_seqlens, output_final_state)
    y = y.transpose(1, 2)
    return y if residual is None else y + residual, end


def convolve(
    x: Tensor, conv: tuple[Tensor, Tensor | None, str | None], state: Tensor | None, offsets: Tensor | None, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, the last W inputs of each sequence if `ends`) of x (B, D, T); state (N, D, W).   conv: weight, bias, act."""
    (weight, bias, activation), (B, D, T), W = conv, x.shape, conv[0].shape[-1]
    if state is None and not ends:
        seq_idx = None if offsets is None else sequence_numbers(offsets, T)
        return causal_conv1d_fn(x, weight, bias, seq_idx, activation=activation), None
    N = B if offsets is None else offsets.shape[0] - 1
    state = x.new_zeros(N, D, W) if state is None else state.to(x.dtype)
    if offsets is None:
        y = causal_conv1d_fn(x, weight, bias, None, state[..., 1:], activation=activation)
        return y, torch.cat([state, x], dim=-1)[..., T:] if ends else None
    number, count = sequence_numbers(offsets, T)[0], torch.arange(N, device=x.device)
    first, place = offsets[:-1].long(), torch.arange(W, device=x.device)
    # the W inputs before a sequence and its tokens, one sequence after the other: token t lies at `at`
    at = torch.arange(T, device=x.device) + (number + 1) * W
    before = (first + count * W)[:, None] + place
    both = torch.cat([state.transpose(0, 1).reshape(D, N * W), x[0]], dim=-1)
    source = torch.cat([before.flatten(), at]).argsort()  # of each place
    row = both[:, source]
    y = causal_conv1d_fn(row[None], weight, bias, activation=activation)[..., at]
    last = (offsets[1:].long() + count * W)[:, None] + place
    return y, row[:, last].transpose(0, 1) if ends else None


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
