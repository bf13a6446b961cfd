"""How far a NaN in any array reaches: its head and sequence, its chunk or its token, and later tokens."""

from __future__ import annotations

import numpy as np
import pytest

from linattn_np.matrix_state.types import Decay
from tests.cases import PLAIN, call, draw

T, AT, C = 70, 53, 16  # in a chunk that begins at 48
START = AT // C * C
BACKENDS = ("reference", "chunks", "numba", None)
POISONED = [(case, name) for case in PLAIN if case.causal for name in case.given
            if case.on_tokens(name) and case.has_heads(name)]  # fmt: skip
every_array = pytest.mark.parametrize(("case", "name"), POISONED, ids=lambda x: str(x).replace(" ", ","))


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


def both(case, name, **options):
    """Outputs (B, T, H, V) without and with a NaN in token AT of batch row 1, head 1."""
    arrays, state = draw(case, T=T, H=3, K=6, V=4, dtype=np.float32)
    clean = call(case, arrays, state=state, **options)[0]
    arrays[name] = arrays[name].copy()
    np.moveaxis(arrays[name], case.heads(name), 0)[1, 1, AT] = np.nan
    with np.errstate(all="ignore"):
        return clean, call(case, arrays, state=state, **options)[0]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@every_array
def test_it_stays_in_its_head_sequence_and_chunk(case, name, backend):
    clean, found = both(case, name, backend=backend, chunk_size=C)
    assert np.isnan(found[1, AT:, 1]).any()
    np.testing.assert_array_equal(found[0], clean[0])
    np.testing.assert_array_equal(found[:, :, [0, 2]], clean[:, :, [0, 2]])
    np.testing.assert_array_equal(found[:, :START], clean[:, :START])
    if stays(case, name, backend):
        np.testing.assert_array_equal(found[:, :AT], clean[:, :AT])


@pytest.mark.parametrize(
    "how", [{"backend": "reference"}, *({"backend": b, "chunk_size": 1} for b in BACKENDS[1:])], ids=str
)
@every_array
def test_token_by_token_it_never_goes_back(case, name, how):
    clean, found = both(case, name, **how)
    np.testing.assert_array_equal(found[:, :AT], clean[:, :AT])
    assert np.isnan(found[1, AT:, 1]).any()
