"""mamba_ssm's functions for torch tensors: its names, order of arguments and states, of Mamba-2 (B, H, V, K)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

import linattn_np as la

from ..ops.gated_norm import GatedNorm
from ..runtime.doorway import WHOLE, expect, expect_whole
from ..runtime.pools import NO_ROW
from . import mamba_selective
from .adapter import Given, named, parameters
from .causal_conv1d import causal_conv1d_fn
from .modules import gated_rms_norm
from .packed import offsets_of_numbers
from .pools import Pool

Tensor = torch.Tensor
DEFAULTS: dict[str, Any] = {
    "D": None, "z": None, "dt_bias": None, "initial_states": None, "seq_idx": None, "cu_seqlens": None,
    "dt_softplus": False, "dt_limit": (0.0, math.inf), "return_final_states": False, "return_varlen_states": False,
    "state_batch_indices": None, "pad_slot_id": NO_ROW, "activation": "silu", "rmsnorm_weight": None,
    "rmsnorm_eps": 1e-6, "outproj_weight": None, "outproj_bias": None, "headdim": None, "ngroups": 1,
    "norm_before_gate": True,
}  # fmt: skip
SCAN = parameters(
    "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit return_final_states "
    "return_varlen_states", DEFAULTS)  # fmt: skip
UPDATE = parameters("state x dt A B C D z dt_bias dt_softplus state_batch_indices pad_slot_id", DEFAULTS)
REQUIRED = ("D", "dt_bias")  # of the last
SPLIT = parameters(
    "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states seq_idx dt_limit return_final_states "
    "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate",
    {n: x for n, x in DEFAULTS.items() if n not in REQUIRED},
)  # fmt: skip


def scan(fn: str, given: Given) -> Any:
    """x (B, T, H, V), dt (B, T, H), A (H,), B and C (B, T, G, K) -> out, or (out, final states (B, H, V, K))."""
    refuse(fn, given, "return_varlen_states")
    sizes = expect(fn, x=(given["x"], "B T H V"), dt=(given["dt"], "B T H"), B=(given["B"], "B T G K"),
                   C=(given["C"], "B T G K"), z=(given["z"], "B T H V?"))  # fmt: skip
    expect(fn, sizes, initial_states=(given["initial_states"], "B H V K?"))
    expect(fn, sizes, WHOLE, seq_idx=(given["seq_idx"], "B T?"), cu_seqlens=(given["cu_seqlens"], "N?"))
    arrays = {n: given[n] for n in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias") if given[n] is not None}
    options = {"dt_softplus": given["dt_softplus"], "dt_limit": given["dt_limit"]}
    if given["cu_seqlens"] is not None or given["seq_idx"] is not None:
        return packed(fn, given, arrays, options)
    if given["initial_states"] is not None:
        options["state"] = given["initial_states"].mT
    if not given["return_final_states"]:
        return la.mamba2(**arrays, **options)
    out, state = la.mamba2(**arrays, **options, return_state=True)
    return out, state.mT


def packed(fn: str, given: Given, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """Sequences packed in rows; the final state of a row is that of its last sequence."""
    if given["initial_states"] is not None:
        raise ValueError(f"{fn}: initial_states and packed sequences are given, expected one of them")
    x, offsets = arrays["x"], given["cu_seqlens"]
    if offsets is None:
        offsets = offsets_of_numbers(given["seq_idx"])
    for name in ("x", "dt", "B", "C", "z"):
        if name in arrays:
            arrays[name] = arrays[name].reshape(1, -1, *arrays[name].shape[2:])
    if not given["return_final_states"]:
        return la.mamba2(**arrays, **options, cu_seqlens=offsets).reshape(x.shape)
    out, states = la.mamba2(**arrays, **options, cu_seqlens=offsets, return_state=True)
    ends = torch.arange(1, x.shape[0] + 1, device=offsets.device) * x.shape[1]
    return out.reshape(x.shape), states[torch.searchsorted(offsets[1:].contiguous(), ends)].mT


def update(fn: str, given: Given) -> Tensor:
    """One token: state (B, H, V, K) is updated in place; x, dt, z (B, H, V), A (H, V, K), D and dt_bias (H, V).

    x (B, D), A (D, N): Mamba-1, with a state (B, D, N). Of heads, dt, dt_bias and A are one number each, the same for
    its channels: Mamba-2. They are compared, which waits for a device, unless they are broadcast by expand.
    state_batch_indices (B,): state is a pool (P, H, V, K); these are the rows; a sequence whose row is
    pad_slot_id begins with zeros, and none is read or written for it. Rows on a device are not checked.
    """
    state, x, rows = given["state"], given["x"], given["state_batch_indices"]
    if getattr(x, "ndim", 0) == 2:
        return mamba_selective.update(fn, given)
    expect(fn, x=(x, "B H V"), state=(state, "B H V K" if rows is None else "P H V K"),
           dt=(given["dt"], "B H V"), A=(given["A"], "H V K"), B=(given["B"], "B G K"),
           C=(given["C"], "B G K"), z=(given["z"], "B H V?"), dt_bias=(given["dt_bias"], "H V?"))  # fmt: skip
    of_head = {}
    for name, channels in (("dt", 1), ("dt_bias", 1), ("A", 2)):
        y = given[name]
        one: Any = y if y is None else y[..., 0] if channels == 1 else y[..., 0, 0]
        of_head[name] = one
        if y is None or not any(y.stride(-1 - n) and y.shape[-1 - n] > 1 for n in range(channels)):
            continue
        one = one[(..., *(None,) * channels)]
        if not bool(((y == one) | (y.isnan() & one.isnan())).all()):
            raise ValueError(
                f"{fn}: {name} has numbers of its own for each channel, expected one number of each head: "
                "channels by themselves have no axis of heads"
            )
    token = {"x": x, "dt": of_head["dt"], "B": given["B"], "C": given["C"], "z": given["z"]}
    arrays = {n: y[:, None] for n, y in token.items() if y is not None}
    weights = {"A": of_head["A"], "D": given["D"], "dt_bias": of_head["dt_bias"]}
    arrays |= {n: y for n, y in weights.items() if y is not None}
    pool = None if rows is None else Pool(fn, "state_batch_indices", state, rows, given["pad_slot_id"], x.shape[0])
    begin = state if pool is None else pool.states()
    out, end = la.mamba2(**arrays, dt_softplus=given["dt_softplus"], state=begin.mT, return_state=True)
    state.copy_(end.mT) if pool is None else pool.put(end.mT)
    return out[:, 0]


def split_scan(fn: str, given: Given) -> Any:
    """The mixer between its projections: convolution, scan, gated norm, output projection, of zxbcdt (B, T, ...)."""
    refuse(fn, given, "initial_states", "return_final_states")
    heads, groups, inner, K = mixer(fn, given)
    conv = given["conv1d_weight"].shape[0]
    z, xBC, dt = given["zxbcdt"].split([inner, conv, heads], dim=-1)
    xBC = causal_conv1d_fn(xBC.transpose(1, 2), given["conv1d_weight"], given["conv1d_bias"], given["seq_idx"],
                           activation=given["activation"]).transpose(1, 2)  # fmt: skip
    x, B, C = xBC.split([inner, groups * K, groups * K], dim=-1)
    more = {"x": x.unflatten(-1, (heads, -1)), "dt": dt, "B": B.unflatten(-1, (groups, K)),
            "C": C.unflatten(-1, (groups, K)), "dt_softplus": True}  # fmt: skip
    normed = given["rmsnorm_weight"] is not None
    if not normed:
        more["z"] = z.unflatten(-1, (heads, -1))
    out = scan(fn, SCAN.defaults | {n: y for n, y in given.items() if n in SCAN.names} | more).flatten(2)
    if normed:
        how = GatedNorm(given["rmsnorm_eps"], gate_first=not given["norm_before_gate"], group=inner // groups)
        out = gated_rms_norm(out, z.to(out.dtype), given["rmsnorm_weight"], how)
    weight = given["outproj_weight"]
    return out if weight is None else F.linear(out.to(weight.dtype), weight, given["outproj_bias"])


def mixer(fn: str, given: Given) -> tuple[int, int, int, int]:
    """(heads, groups, channels of x, K) of a mixer whose tensors fit; C channels are convolved."""
    groups, headdim = given["ngroups"], given["headdim"]
    expect_whole(fn, "ngroups", groups)
    sizes = expect(fn, dt_bias=(given["dt_bias"], "H"), A=(given["A"], "H"), D=(given["D"], "..."),
                   conv1d_weight=(given["conv1d_weight"], "C W"), conv1d_bias=(given["conv1d_bias"], "C?"))  # fmt: skip
    expect_whole(fn, "W of conv1d_weight", sizes["W"])
    heads, channels = sizes["H"], sizes["C"]
    if headdim is not None:
        expect_whole(fn, "headdim", headdim)
    inner = given["D"].numel() if headdim is None else heads * headdim
    K, left = divmod(channels - inner, 2 * groups)
    if K < 0 or left or inner % max(heads, 1) or inner % groups:
        raise ValueError(
            f"{fn}: conv1d_weight has {channels} channels, expected the channels of x, B and C: {inner} + "
            f"2 * {groups} * K, with H = {heads} and ngroups dividing {inner}"
        )
    expect(fn, {"I": inner, "P": inner + channels + heads}, zxbcdt=(given["zxbcdt"], "B T P"),
           rmsnorm_weight=(given["rmsnorm_weight"], "I?"), outproj_weight=(given["outproj_weight"], "O I?"),
           outproj_bias=(given["outproj_bias"], "O?"))  # fmt: skip
    return heads, groups, inner, K


def refuse(fn: str, given: Given, *names: str) -> None:
    for name in names:
        if given[name] is not None and given[name] is not False:
            raise ValueError(f"{fn}: {name} is not supported, expected {DEFAULTS[name]}")


mamba_chunk_scan_combined = named("mamba_chunk_scan_combined", SCAN, scan)
selective_state_update = named("selective_state_update", UPDATE, update)
selective_scan_fn = named("selective_scan_fn", mamba_selective.FUNCTION, mamba_selective.scan)
mamba_inner_fn = named("mamba_inner_fn", mamba_selective.INNER, mamba_selective.inner)
mamba_split_conv1d_scan_combined = named("mamba_split_conv1d_scan_combined", SPLIT, split_scan)
