"""mamba_ssm's functions of Mamba-1 for torch tensors: its layout (B, D, T), its names and order of arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import linattn_np as la

from ..runtime.doorway import STORAGE, expect
from .adapter import Given, parameters
from .causal_conv1d import causal_conv1d_fn
from .pools import Pool

Tensor = torch.Tensor
NUMBERS = (*STORAGE, "complex64", "complex128")
FUNCTION = parameters(
    "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False", {}
)  # fmt: skip
INNER = parameters(
    "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B=None C=None D=None "
    "delta_bias=None B_proj_bias=None C_proj_bias=None delta_softplus=True checkpoint_lvl=1 b_rms_weight=None "
    "c_rms_weight=None dt_rms_weight=None b_c_dt_rms_eps=1e-6", {})  # fmt: skip


def scan(fn: str, given: Given) -> Any:
    """u, delta, z (B, D, T), A (D, N), B and C (B, N, T) or (B, G, N, T) -> out (B, D, T), or (out, state (B, D, N)).

    G groups of channels share B and C. With a complex A, those are complex, or real of 2 T numbers: real and imaginary
    part of each token side by side. Constant B and C, (D, N), are not supported. All arguments have gradients, also
    through the last state.
    """
    u, A, B, C = (given[n] for n in ("u", "A", "B", "C"))
    sizes = expect(fn, u=(u, "B D T"), delta=(given["delta"], "B D T"), z=(given["z"], "B D T?"))
    expect(fn, sizes, NUMBERS, A=(A, "D N"))
    rows = {n: _vectors(fn, n, y, A, sizes) for n, y in (("B", B), ("C", C))}
    if rows["B"].shape != rows["C"].shape:
        raise ValueError(f"{fn}: C has shape {tuple(C.shape)}, expected that of B: {tuple(B.shape)}")
    tokens = {"x": u, "dt": given["delta"], "z": given["z"]}
    given_tokens = {n: y.transpose(1, 2) for n, y in tokens.items() if y is not None}
    constants = {n: y for n, y in (("A", A), ("D", given["D"]), ("dt_bias", given["delta_bias"])) if y is not None}
    groups = rows["B"].shape[1]
    if sizes["D"] % groups:
        raise ValueError(f"{fn}: B has {groups} groups and u {sizes['D']} channels, expected a divisor of {sizes['D']}")
    outs, ends, width = [], [], sizes["D"] // max(groups, 1)
    for g in range(groups):
        own = slice(g * width, (g + 1) * width)
        arrays: Given = {n: y[..., own] for n, y in given_tokens.items()} | {n: y[own] for n, y in constants.items()}
        arrays |= {n: y[:, g].transpose(1, 2) for n, y in rows.items()}
        out, end = la.selective_scan(**arrays, dt_softplus=given["delta_softplus"], return_state=True)
        outs.append(out)
        ends.append(end)
    out, end = (y[0] if groups == 1 else torch.cat(y, dim) for y, dim in ((outs, -1), (ends, 1)))
    return (out.transpose(1, 2), end) if given["return_last_state"] else out.transpose(1, 2)


def _vectors(fn: str, name: str, y: Tensor, A: Tensor, sizes: dict[str, int]) -> Tensor:
    """B or C as (B, G, N, T)."""
    if getattr(y, "ndim", 0) == 3:
        y = y[:, None]
    if A.is_complex() and not y.is_complex() and y.shape[-1] == 2 * sizes["T"]:
        y = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)).contiguous())
    expect(fn, sizes | {"N": A.shape[1]}, NUMBERS, **{name: (y, "B G N T")})
    return y


def update(fn: str, given: Given) -> Tensor:
    """One token: state (B, D, N) is updated in place; x, dt, z (B, D), A (D, N), B and C (B, N), D and dt_bias (D,).

    state_batch_indices (B,): state is a pool (P, D, N), as of Mamba-2.
    """
    state, x, rows = given["state"], given["x"], given["state_batch_indices"]
    expect(fn, x=(x, "B D"), state=(state, "B D N" if rows is None else "P D N"), dt=(given["dt"], "B D"),
           A=(given["A"], "D N"), B=(given["B"], "B N"), C=(given["C"], "B N"), z=(given["z"], "B D?"),
           D=(given["D"], "D?"), dt_bias=(given["dt_bias"], "D?"))  # fmt: skip
    arrays = {n: given[n][:, None] for n in ("x", "dt", "B", "C", "z") if given[n] is not None}
    arrays |= {n: given[n] for n in ("A", "D", "dt_bias") if given[n] is not None}
    pool = None if rows is None else Pool(fn, "state_batch_indices", state, rows, given["pad_slot_id"], x.shape[0])
    begin = state if pool is None else pool.states()
    out, end = la.selective_scan(**arrays, dt_softplus=given["dt_softplus"], state=begin, return_state=True)
    state.copy_(end) if pool is None else pool.put(end)
    return out[:, 0]


def inner(fn: str, given: Given) -> Tensor:
    """The mixer between its projections: convolution, x and dt projections, scan and gate, output projection.

    xz (B, 2 D, T), conv1d_weight (D, W) or (D, 1, W), x_proj_weight (R + 2 N, D), delta_proj_weight (D, R) ->
    (B, T, out). B and C given are used instead of those of the projection. *_rms_weight: norms of B, C and dt.
    checkpoint_lvl has no effect.
    """
    x, z = given["xz"].chunk(2, dim=1)
    weight, A = given["conv1d_weight"], given["A"]
    x = causal_conv1d_fn(x, weight[:, 0] if weight.ndim == 3 else weight, given["conv1d_bias"], activation="silu")
    rank, N = given["delta_proj_weight"].shape[1], A.shape[1]
    parts = F.linear(x.transpose(1, 2), given["x_proj_weight"])
    dt, rest = parts.split([rank, parts.shape[-1] - rank], dim=-1)
    own = (
        dict(zip((n for n in "BC" if given[n] is None), rest.split(N, dim=-1), strict=False)) if rest.shape[-1] else {}
    )
    for name, y in own.items():
        bias = given[f"{name}_proj_bias"]
        own[name] = y if bias is None else y + bias
        own[name] = _normed(own[name], given[f"{name.lower()}_rms_weight"], given["b_c_dt_rms_eps"])
    dt = _normed(dt, given["dt_rms_weight"], given["b_c_dt_rms_eps"])
    vectors = {n: own[n].transpose(1, 2) if n in own else given[n] for n in "BC"}
    call = {n: given[n] for n in ("A", "D", "delta_bias", "delta_softplus")} | vectors
    delta = F.linear(dt, given["delta_proj_weight"]).transpose(1, 2)
    out = scan(fn, FUNCTION.defaults | call | {"u": x, "delta": delta, "z": z})
    bias = given["out_proj_bias"]
    dtype = given["out_proj_weight"].dtype
    return F.linear(out.transpose(1, 2).to(dtype), given["out_proj_weight"], None if bias is None else bias.to(dtype))


def _normed(y: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return y if weight is None else F.rms_norm(y, weight.shape, weight, eps)
