"""Findings of la.check about the numbers of single pieces, besides NaN and inf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ..call.findings import FORGOTTEN, Finding
from ..runtime.arrays import dtype_name

Arrays = Mapping[str, Any]
STEEP = 20.0  # rates above e^20 forget everything at once
HALVINGS = 70.0  # multiples of scale_base in which float32 holds the sizes of xPos


def of_norm(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Rows of zeros without eps, whose gradient is infinite."""
    x = own["x"]
    if given["eps"] == 0 and prod(x.shape) and bool(c.xp.any(c.xp.all(x == 0, axis=-1))):
        yield Finding("x", "has rows of zeros and eps is 0: their gradient is infinite", False)


def of_rows(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Heads and tokens that seem to be exchanged."""
    T, H, K = own["x"].shape[-3:]
    if H > T > 1:
        yield Finding("x", f"has {T} tokens of {H} heads in the layout (..., T, H, {K}): if it is (..., H, T, K), "
                      "exchange the axes", False)  # fmt: skip


def of_xpos(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Positions so far from 0 that the sizes leave the range of float32."""
    yield from of_rows(c, own, given)
    far = max(abs(given["offset"]), abs(given["offset"] + own["x"].shape[-3] - 1))
    if far > HALVINGS * given["scale_base"] and dtype_name(own["x"]) != "float64":
        yield Finding("offset", f"puts a token at {far}, beyond {HALVINGS:g} scale_base: sizes leave the range of "
                      "float32; offset=-T // 2 halves the distance", True)  # fmt: skip


def of_log_decay(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Rates that are not logarithms."""
    A = own["A_log"]
    if A is not None and prod(A.shape) and (most := float(c.xp.max(A))) > STEEP:
        yield Finding("A_log", f"is {most:.4g}, a rate of e^{most:.4g}: each token forgets everything before it; it is "
                      f"the logarithm of a rate, and g is below {FORGOTTEN:g}", False)  # fmt: skip


def of_labels(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Labels of which none has a loss."""
    labels = own["labels"]
    if prod(labels.shape) and bool(c.xp.all(labels == given["ignore_index"])):
        yield Finding("labels", f"is ignore_index={given['ignore_index']} everywhere: the loss and its gradients are 0",
                      False)  # fmt: skip


def of_lse(c: Any, own: Arrays, given: Arrays) -> Iterator[Finding]:
    """Queries that read nothing in both parts."""
    none = (own["lse1"] == -float("inf")) & (own["lse2"] == -float("inf"))
    if prod(none.shape) and (count := int(c.xp.sum(c.xp.astype(none, c.xp.int8)))):
        yield Finding("lse1", f"is -inf at {count} places where lse2 is -inf, too: these queries read no key", False)
