"""Checks of integers that are numbers of rows: compiled loops trust them, so recorded calls repeat the checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def check_numbers(fn: str, name: str, x: np.ndarray, V: int) -> None:
    """Raise ValueError for a number outside of 0..V - 1."""
    if x.size:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= V:
            raise ValueError(f"{fn}: {name} has the number {low if low < 0 else high}, expected 0..{V - 1}")


def check_ids(given: Mapping[str, Any]) -> bool:
    """Of an embedding. Returns whether recorded kernels may compute the call: they may."""
    check_numbers("embedding", "ids", given["ids"], given["weight"].shape[0])
    return True


def check_labels(given: Mapping[str, Any]) -> bool:
    """Of the cross-entropy; ignore_index is allowed.

    Returns whether recorded kernels may compute the call: not of hidden states, if there is a position without a loss.
    """
    labels, weight = given["labels"], given["weight"]
    V = (given["x"] if weight is None else weight).shape[-1]
    if labels.size and (labels.min() < 0 or labels.max() >= V):
        check_numbers("cross_entropy", "labels", labels[labels != given["ignore_index"]], V)
    return weight is None or have_losses(labels, given["ignore_index"])


def have_losses(labels: np.ndarray, ignored: int) -> bool:
    """Whether every position has a loss."""
    return bool((labels != ignored).all())
