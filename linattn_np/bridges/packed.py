"""Packed sequences: what transformers says of them, as offsets (cu_seqlens) and as numbers of tokens (seq_idx)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
OFFSETS = "cu_seq_lens_q"  # transformers' name of cu_seqlens, among the keywords of every layer


def with_sequences(known: frozenset[str], keywords: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of a call, with transformers' offsets under the name that the function knows."""
    offsets = keywords.get(OFFSETS)
    if offsets is None:
        return keywords
    if "cu_seqlens" in known and keywords.get("cu_seqlens") is None and keywords.get("seq_idx") is None:
        return keywords | {"cu_seqlens": offsets}
    if "cu_seqlens" not in known and "seq_idx" in known and keywords.get("seq_idx") is None:
        x = args[0] if args else keywords["x"]
        return keywords | {"seq_idx": sequence_numbers(offsets, x.shape[-1])}
    return keywords


def with_offsets(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward that derives offsets from position_ids where it is given no mask, no cache and no offsets."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        position_ids = keywords.get("position_ids")
        others = ("attention_mask", "past_key_values", OFFSETS)
        if position_ids is not None and len(args) < 2 and all(keywords.get(n) is None for n in others):
            offsets = offsets_of_positions(position_ids)
            keywords = keywords if offsets is None else keywords | {OFFSETS: offsets}
        return forward(self, *args, **keywords)

    return call


def offsets_of_positions(position_ids: Tensor) -> Tensor | None:
    """cu_seqlens of one row (1, T) in which a sequence begins where positions do not go up by one; None for one."""
    if position_ids.ndim != 2 or position_ids.shape[0] != 1:
        return None
    starts = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=position_ids.shape[1]) if len(starts) else None


def offsets_of_numbers(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of the runs of equal numbers in the rows (B, T), rows one after the other."""
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return F.pad(new.flatten().nonzero()[:, 0], (0, 1), value=seq_idx.numel())


def sequence_numbers(cu_seqlens: Tensor, T: int) -> Tensor:
    """The number of the sequence of each token, (1, T)."""
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)[None]


def position_of(seq_idx: Tensor) -> Tensor:
    """The number of each token within its sequence, (B, T), where sequences are runs of equal numbers."""
    at = torch.arange(seq_idx.shape[-1], device=seq_idx.device)
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[..., 1:] = seq_idx[..., 1:] != seq_idx[..., :-1]
    return at - torch.cummax(torch.where(new, at, 0), dim=-1).values
