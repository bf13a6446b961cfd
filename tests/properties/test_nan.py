"""How far a NaN in any array reaches: its head and sequence, its chunk or its token, and later tokens."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state.types import Decay, Readout
from tests.cases import PLAIN, call, draw


def has_levels(case):
    return case.spec.readout is Readout.LEVELS


T, AT, C = 70, 53, 16  # in a chunk that begins at 48
BEFORE, FIRST = 14, 50  # calls with levels have chunks of positions: tokens before a call, the first one of a chunk
BACKENDS = ("reference", "chunks", "numba", None)
POISONED = [(case, name, at) for case in PLAIN if case.causal for name in case.given
            if case.on_tokens(name) and case.has_heads(name) for at in ((AT, FIRST) if has_levels(case) else (AT,))
            ]  # fmt: skip
every_array = pytest.mark.parametrize(("case", "name", "at"), POISONED, ids=lambda x: str(x).replace(" ", ","))


def stays(case, name, backend):
    """Whether docs/accuracy.md says that earlier tokens of the chunk never see it, in a chunk form."""
    if case.learns:  # coefficients of all pairs of a tile
        return name == case.spec.change.query
    if name in ("v", "x", "beta", "a", "b", "p", "w", "dt", "i", "f", "trap", "g_square", "beta_square") or (
        name == "A" and "trap" in case.given
    ):
        return False
    if name == "k":
        return not case.erases
    if name == "g":
        summed = case.spec.decay is Decay.SCALAR and backend == "chunks"
        return not (case.erases or case.spec.state.wide or summed)
    return True


def both(case, name, at, compute=lambda *given, **options: call(*given, **options)[0], **options):
    """Outputs (B, T, H, V) without and with a NaN in token `at` of batch row 1, head 1."""
    arrays, state = draw(case, T=T, H=3, K=6, V=4, dtype=np.float32)
    if has_levels(case):
        state = state._replace(position=np.full_like(state.position, BEFORE))
    clean = compute(case, arrays, state=state, **options)
    arrays[name] = arrays[name].copy()
    np.moveaxis(arrays[name], case.heads(name), 0)[1, 1, at] = np.nan
    with np.errstate(all="ignore"):
        return clean, compute(case, arrays, state=state, **options)


def chunk_of(case, at):
    """The first token of the chunk of token `at`."""
    return (at + BEFORE) // C * C - BEFORE if has_levels(case) else at // C * C


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@every_array
def test_it_stays_in_its_head_sequence_and_chunk(case, name, at, backend):
    (clean, found), start = both(case, name, at, backend=backend, chunk_size=C), chunk_of(case, at)
    assert np.isnan(found[1, at:, 1]).any()
    np.testing.assert_array_equal(found[0], clean[0])
    np.testing.assert_array_equal(found[:, :, [0, 2]], clean[:, :, [0, 2]])
    np.testing.assert_array_equal(found[:, :start], clean[:, :start])
    if stays(case, name, backend):
        np.testing.assert_array_equal(found[:, :at], clean[:, :at])


@pytest.mark.parametrize(
    "how", [{"backend": "reference"}, *({"backend": b, "chunk_size": 1} for b in BACKENDS[1:])], ids=str
)
@every_array
def test_token_by_token_it_never_goes_back(case, name, at, how):
    clean, found = both(case, name, at, **how)
    np.testing.assert_array_equal(found[:, :at], clean[:, :at])
    assert np.isnan(found[1, at:, 1]).any()
