"""Feature maps of the recurrent form: heads whose features are computed at once."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import linattn_np as la

RANDOM_MAPS = [fn for fn in la.VARIANTS if "num_features" in fn.spec.options]


@pytest.mark.parametrize("fn", RANDOM_MAPS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("heads", [{"H": 3, "Hq": 3}, {"H": 10, "Hq": 20}, {"H": 9, "Hk": 3, "Hq": 9}], ids=str)
def test_heads_whose_features_are_computed_at_once(fn, heads):
    """A head has the same bits alone and among others, and so has a token."""
    x = la.testing.sample(fn, np.random.default_rng(0), B=(2,), T=3, K=5, V=4, **{"Hk": heads["H"]} | heads)
    x = {n: y.astype(np.float32) for n, y in x.items()}
    H, group, shared = heads["H"], heads["Hq"] // heads["H"], heads["H"] // heads.get("Hk", heads["H"])
    (_, state), whole = (fn(**{n: y[:, s] for n, y in x.items()}, return_state=True, normalize=False)
                         for s in (slice(0, 2), slice(0, 3)))  # fmt: skip
    token = {n: y[:, 2:3] for n, y in x.items()}
    out, end = fn(**token, state=state, return_state=True, normalize=False)
    np.testing.assert_array_equal(out, whole.out[:, 2:3])
    np.testing.assert_array_equal(end, whole.state)
    packed = {n: y.reshape(1, 6, *y.shape[2:])[:, 1:3] for n, y in x.items()}  # two tokens, each a sequence
    ragged = fn(**packed, cu_seqlens=np.array([0, 1, 2]), return_state=True, normalize=False)
    for h in range(H):
        own = {"q": slice(h * group, (h + 1) * group), "k": slice(h // shared, h // shared + 1)}
        one = {n: y[:, :, own.get(n, slice(h, h + 1))] for n, y in token.items()}
        alone = fn(**one, state=state[:, h : h + 1].copy(), return_state=True, normalize=False)
        np.testing.assert_array_equal(alone.out, out[:, :, h * group : (h + 1) * group])
        np.testing.assert_array_equal(alone.state[:, 0], end[:, h])
    for n in range(2):
        alone = fn(**{name: y[:, n : n + 1] for name, y in packed.items()}, return_state=True, normalize=False)
        np.testing.assert_array_equal(alone.state[0], ragged.state[n])
