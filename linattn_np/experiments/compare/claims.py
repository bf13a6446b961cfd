"""Claims of papers about mixers, and what the runs say: supported, contradicted, no difference, inconclusive, open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..statistics import SUPPORTED, paired_difference
from .results import Cell

OPEN = "open: not both were run"


class Claim(NamedTuple):
    """`better` has the higher score, or lower loss, than `worse` on a task, by at least `least`.

    costs_nothing: the claim is that it is not worse by `least`.
    """

    text: str
    better: str
    worse: str
    task: str
    least: float = 0.05
    source: str = ""
    costs_nothing: bool = False


NEGATIVE, UNCONVOLVED = "delta_rule:allow_neg_eigval", "unconvolved:allow_neg_eigval"
CLAIMS = (
    Claim("steps with eigenvalues in [-1, 1] track parity", NEGATIVE, "delta_rule", "parity", 0.3, "arXiv 2411.12537"),
    Claim("they track products of permutations of 3", NEGATIVE, "delta_rule", "s3", 0.05, "arXiv 2411.12537"),
    Claim("one layer of them tracks exchanges of 5 items", UNCONVOLVED, "unconvolved", "s5_swaps", 0.3,
          "arXiv 2411.12537"),
    Claim("the delta rule recalls more than sums", "delta_rule", "sums", "mqar", 0.05, "arXiv 2406.06484"),
    Claim("it recalls more facts", "delta_rule", "sums", "capacity", 0.05, "arXiv 2406.06484"),
    Claim("it rebinds keys", "delta_rule", "sums", "rebinding", 0.05, "arXiv 2102.11174"),
    Claim("a decay helps on text", "decayed", "plain", "text", 0.02, "arXiv 2312.06635"),
    Claim("no activation of queries and keys is needed", "plain", "plain_elu", "text", 0.02, "arXiv 2307.08621", True),
    Claim("nor a normaliser", "plain", "plain_normalised", "text", 0.02, "arXiv 2210.10340", True),
    Claim("rotary embeddings help a little", "rotated", "decayed", "text", 0.005, "arXiv 2307.08621"),
    Claim("and in softmax attention", "softmax_attention", "unrotated", "text", 0.005, "arXiv 2104.09864"),
    Claim("gates filter noise", "gated_delta_rule", "delta_rule", "mad_noisy", 0.05, "arXiv 2412.06464"),
    Claim("gates filter a text", "gated_delta_rule", "delta_rule", "needle2", 0.05, "arXiv 2412.06464"),
    Claim("gates help on text", "gated_delta_rule", "delta_rule", "text", 0.01, "arXiv 2412.06464"),
    Claim("Comba is better on text", "comba", "gated_delta_rule", "text", 0.005, "arXiv 2506.02475"),
    Claim("MesaNet is better than DeltaNet on text", "mesa_net", "delta_rule", "text", 0.01, "arXiv 2506.05233"),
    Claim("softmax recalls what states of fixed size lose", "softmax_attention", "mamba2", "capacity", 0.05,
          "arXiv 2312.04927"),
    Claim("DeltaFormer costs nothing on text", "deltaformer", "unrotated", "text", 0.01, "arXiv 2505.19488", True),
    Claim("rates of channels help on text", "kda", "gated_delta_rule", "text", 0.005, "arXiv 2510.26692"),
)  # fmt: skip


def verdict(claim: Claim, cells: Mapping[tuple[str, str], Cell]) -> str:
    """The difference over seeds with its 95 % interval, in a word and numbers."""
    one, other = (cells.get((claim.task, mixer)) for mixer in (claim.better, claim.worse))
    if one is None or other is None:
        return OPEN
    x, y = np.array(one.seeds), np.array(other.seeds)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return "inconclusive: a run diverged"
    found = paired_difference(y - x if one.is_loss else x - y, claim.least, claim.least)
    if claim.costs_nothing and found.mean - found.half_width > -claim.least:
        found = replace(found, word=SUPPORTED)
    width = f" +- {found.half_width:.3f}" if np.isfinite(found.half_width) else ", one seed"
    return f"{found.word}: {found.mean:+.3f}{width}"
