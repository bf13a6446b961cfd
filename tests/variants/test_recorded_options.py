"""One token of every variant of the matrix-state core, with each of its options, is recorded as a whole."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np import catalog
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import core

SWITCHES = ("qk_l2norm", "beta_sigmoid", "dt_softplus")
VARIANTS = [fn for fn in catalog.variants() if fn.spec.core is core]


def settings(fn):
    """Options, and whether optional arrays are given."""
    defaults = fn.spec.options
    options = [o for o in fn.samples.options if o.get("causal", True)]
    options += [{name: True} for name in SWITCHES if name in defaults]
    options += [{"feature_map": "elu+1"}] if "feature_map" in defaults else []
    return [(o, with_all) for o in options or [{}] for with_all in (False, True)]


def may_be_in_part(fn, options):
    """NumPy computes a formula with these options, or looks at a number."""
    maps = options.get("feature_map") in ("hedgehog", "dpfp")
    return maps or fn is la.delta_product or (fn is la.retnet and "xpos" in options)


@pytest.mark.parametrize("fn", VARIANTS, ids=lambda fn: fn.spec.name)
def test_one_token_is_recorded_as_a_whole(fn):
    rng = np.random.default_rng(0)
    drawn = la.testing.sample(fn, rng, B=(1,), T=1, H=2, K=8, V=8)
    for options, with_all in settings(fn):
        x = {n: y.astype(np.float32) for n, y in drawn.items() if with_all or not fn.spec.arrays[n].optional}
        first, state = fn(**x, **options, return_state=True)
        for more in ({"state": None}, {"state": state}, {"state": state, "overwrite_state": True}):
            keywords = x | options | more | {"return_state": True}
            replay.clear()
            out = fn(**keywords)[0]
            key = replay.signature_of(fn.spec, (), keywords)[0]
            assert key in replay.by_key
            words = f"{options}, all arrays: {with_all}, {[*more]}"
            assert key not in replay.reasons or may_be_in_part(fn, options), words
            if more["state"] is None:
                np.testing.assert_array_equal(out, first)
