"""Calls on arrays that look like CuPy's, which overwrite a cache and are recorded in part."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.matrix_state.cuda.step_twin import stub
from tests.matrix_state.cuda.token.host import launched, public  # noqa: F401


@pytest.mark.parametrize("T", [1, 3])
def test_a_repeated_call_overwrites_another_cache(public, T):  # noqa: F811
    """And an input that shares memory with a part of the cache is an error in it too."""
    rng = np.random.default_rng()
    given = [rng.standard_normal((2, T, 2, 4)) for _ in range(3)] + [rng.random(2)]
    shapes = (2, 6, 2, 4), (2, 6, 2, 4), (2, 6, 2)
    options = {"overwrite_state": True, "backend": "chunks"}
    arrays = [stub(x.astype(np.float32)) for x in given]
    for _ in range(3):
        parts = [*(-rng.random(shape).astype(np.float32) for shape in shapes), np.array([5, 9])]
        exact = la.GatedCache(*(x.astype(np.float64) for x in parts[:-1]), parts[-1].copy())
        wanted = la.alibi(*(x.astype(np.float32).astype(np.float64) for x in given), state=exact, **options)
        cache = la.GatedCache(*map(stub, parts))
        found = la.alibi(*arrays, state=cache, **options)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        for x, y in zip(cache, exact, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    inside = cache._replace(b=arrays[0].reshape(-1)[: cache.b.size].reshape(cache.b.shape) if T == 3 else cache.b)
    if T == 3:
        with pytest.raises(ValueError, match=r"state\.b and q share memory"):
            la.alibi(*arrays, state=inside, **options)
