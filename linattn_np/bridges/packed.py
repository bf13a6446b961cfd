"""Packed sequences: the arguments of transformers as offsets (cu_seqlens) and as numbers of tokens (seq_idx)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Given = dict[str, Any]  # the arguments of a model's forward by their names
OFFSETS, NUMBERS, POSITIONS = "cu_seq_lens_q", "seq_idx", "position_ids"  # of transformers, each marks sequences
CACHES = ("cache", "past_key_values", "cache_params")  # the cache's names in its versions
UNTOLD = ("GraniteMoeHybridModel",)  # whose softmax layers see sequences in a mask alone
UNMARKED = "it does not hand the mark to its layers"
ACROSS = {  # models that run across sequences, and why
    **dict.fromkeys(
        ("MambaModel", "MambaForCausalLM", "FalconMambaModel", "FalconMambaForCausalLM", "JambaModel"), UNMARKED
    ),
    "Mamba2ForCausalLM": "it does not hand the mark to its layers, Mamba2Model does",
    "RecurrentGemmaModel": "its convolutions run across sequences",
    "xLSTMModel": UNMARKED,
    "Glm5NextModel": "its indexed attention runs across sequences",
    "Glm5NextTextModel": "its indexed attention runs across sequences",
    "Qwen4ExpTextModel": "its n-gram embeddings run across sequences",
}


def with_sequences(known: frozenset[str], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's function, with transformers' offsets under the name that the function knows."""
    offsets = keywords.pop(OFFSETS, None)
    if offsets is None or any(keywords.get(n) is not None for n in ("cu_seqlens", NUMBERS)):
        return keywords
    if "cu_seqlens" in known:
        return keywords | {"cu_seqlens": offsets}
    if NUMBERS in known:
        return keywords | {NUMBERS: sequence_numbers(offsets, keywords["x"].shape[-1])}
    return keywords


def apart(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The forward of a class `name` that keeps the sequences of a row apart in every layer, however they are marked.

    Recurrences get offsets, softmax layers positions. Raises ValueError for several rows, a cache, a padding mask and
    the classes of ACROSS.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | keywords
        offsets = offsets_of(given)
        if offsets is None:
            return forward(self, *args, **keywords)
        check(self, name, given)
        check_positions(self, name, given, offsets)
        given.pop(NUMBERS, None)
        given |= {OFFSETS: offsets, "use_cache": False}
        if given.get(POSITIONS) is None:
            given[POSITIONS] = position_of(sequence_numbers(offsets, row_of(given).shape[1]))
        if name in UNTOLD and given.get("attention_mask") is None:
            given["attention_mask"] = mask_of(self, name, given)
        return forward(self, **given)

    return call


def offsets_of(given: Given) -> Tensor | None:
    """cu_seqlens of a model's row; None without a mark. Positions mark sequences without a mask and a cache alone."""
    if given.get(OFFSETS) is not None:
        return given[OFFSETS]
    if given.get(NUMBERS) is not None:
        return offsets_of_numbers(given[NUMBERS])
    if given.get(POSITIONS) is None or any(given.get(n) is not None for n in ("attention_mask", *CACHES)):
        return None
    return offsets_of_positions(given[POSITIONS])


def check(model: Any, fn: str, given: Given) -> None:
    """One row of a model that keeps sequences apart, without a cache and a padding mask."""
    row, mask = row_of(given), given.get("attention_mask")
    if fn in ACROSS and getattr(model.config, "ple_layer_ids", True):  # Qwen4-Exp may be without n-grams
        mark = next(n for n in (OFFSETS, NUMBERS, POSITIONS) if given.get(n) is not None)
        raise ValueError(f"{fn}: {mark} marks packed sequences, expected one sequence in a row: {ACROSS[fn]}")
    if row.shape[0] != 1:
        raise ValueError(f"{fn}: packed sequences in {row.shape[0]} rows, expected one row (1, T)")
    if given.get("use_cache") or any(given.get(n) is not None for n in CACHES):
        raise ValueError(f"{fn}: packed sequences and a cache, expected use_cache=False")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        raise ValueError(f"{fn}: packed sequences and a mask of shape {tuple(mask.shape)}, expected None or "
                         "(1, 1, T, T)")  # fmt: skip


def check_positions(model: Any, fn: str, given: Given, offsets: Tensor) -> None:
    """Positions tell softmax layers of the same sequences."""
    positions = given.get(POSITIONS)
    if positions is None or by_flash(model) or torch.compiler.is_compiling():
        return
    starts = offsets[(offsets > 0) & (offsets < positions.shape[-1])].long()
    if not (positions.diff() != 1)[..., starts - 1].all():
        raise ValueError(f"{fn}: position_ids go up by one where a sequence begins, expected them to restart")


def by_flash(model: Any) -> bool:
    """FlashAttention's softmax layers see sequences in offsets, others in positions."""
    return "flash" in (model.config._attn_implementation or "")


def row_of(given: Given) -> Tensor:
    """The tokens (B, T) or their embeddings (B, T, D)."""
    return given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]


def mask_of(model: Any, fn: str, given: Given) -> Tensor | None:
    """(1, 1, T, T) for softmax layers: 0 at earlier tokens of the same sequence, else the least number."""
    if by_flash(model):
        if given.get("cu_seq_lens_k") is None:
            raise ValueError(f"{fn}: packed sequences by position_ids, expected cu_seq_lens_q, "
                             "cu_seq_lens_k, max_length_q and max_length_k for FlashAttention")  # fmt: skip
        return None
    row = row_of(given)
    number = sequence_numbers(given[OFFSETS], row.shape[1])[0]
    seen = (number[:, None] == number).tril()
    return torch.zeros(seen.shape, dtype=model.dtype, device=row.device).masked_fill(
        ~seen, torch.finfo(model.dtype).min)[None, None]  # fmt: skip


def offsets_of_positions(position_ids: Tensor) -> Tensor | None:
    """cu_seqlens of rows, one after the other, in which a sequence begins where positions do not go up by one.

    None for one sequence in each row. (4, B, T): the positions of the text are the first; (3, B, T) marks nothing.
    """
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[0]
    if position_ids.ndim != 2 or not (position_ids.diff() != 1).any():
        return None
    return offsets_of_numbers(F.pad((position_ids.diff() != 1).cumsum(-1), (1, 0)))


def offsets_of_numbers(seq_idx: Tensor) -> Tensor:
    """cu_seqlens of the runs of equal numbers in the rows (B, T), rows one after the other.

    A graph has B T sequences, most of them empty, since it cannot count them.
    """
    new = torch.ones_like(seq_idx, dtype=torch.bool)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    if torch.compiler.is_compiling():
        tokens = torch.arange(seq_idx.numel(), device=seq_idx.device)
        first = torch.where(new.flatten(), tokens, seq_idx.numel()).sort().values
        return F.pad(first, (0, 1), value=seq_idx.numel())
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
