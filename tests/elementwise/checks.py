"""Checks that the tests of several variants share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import linattn_np as la
from linattn_np.testing import check_vjp


def packed_sequences_are_one_by_one(fn, arrays, tokens, state, **options):
    """Four sequences, one of them empty: the bits of each alone, and exact gradients.

    tokens: names of the arrays that have an axis of 40 tokens.
    """
    offsets = [0, 0, 1, 35, 40]
    (out, end), _ = la.vjp(fn, **arrays, state=state, cu_seqlens=offsets, return_state=True, **options)
    for n, (start, stop) in enumerate(pairwise(offsets)):
        own = arrays | {name: arrays[name][:, start:stop] for name in tokens}
        one, last = fn(**own, state=state[n : n + 1], return_state=True, **options)
        np.testing.assert_array_equal(out[:, start:stop], one)
        np.testing.assert_array_equal(end[n : n + 1], last)
    check_vjp(fn, **arrays, state=state, cu_seqlens=offsets, **options)
