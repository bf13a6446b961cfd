"""Steps of mlstm that are replayed: S and n walk apart, and give the bits of the call that joins them."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay

pytest.importorskip("numba")


def walk(arrays, options, overwrite, again):
    """(outputs, last state, how many calls were remembered) of tokens 3 to 9, one at a time."""
    replay.clear()
    state = la.mlstm(**{n: x[:, :3] for n, x in arrays.items()}, return_state=True, **options).state
    state, outs, made = type(state)(*(np.array(S) for S in state)), [], 0
    for t in range(3, 10):
        if not again:
            replay.clear()
        token = {n: x[:, t : t + 1].copy() for n, x in arrays.items()}
        if overwrite:
            outs.append(la.mlstm(**token, state=state, overwrite_state=True, **options))
        else:
            out, state = la.mlstm(**token, state=state, return_state=True, **options)
            outs.append(out)
        made += sum(call is not None for call in replay.by_key.values())
    return outs, state, made


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("options", [{}, {"forget_gate": "exp"}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_made_again_has_the_bits_of_the_first(dtype, options, overwrite):
    rng = np.random.default_rng(0)
    arrays = {n: x.astype(dtype) for n, x in la.testing.sample(la.mlstm, rng, T=10, H=4, K=7, V=5, Hk=2).items()}
    outs, state, made = walk(arrays, options, overwrite, True)
    others, other, _ = walk(arrays, options, overwrite, False)
    assert made
    for mine, theirs in zip([*outs, *state], [*others, *other], strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == dtype


def test_gates_far_apart_in_a_step_made_again():
    """A gate that shuts all that was, an input gate that shuts the token, and neither is read: 0, not NaN."""
    rng = np.random.default_rng(1)
    arrays = la.testing.sample(la.mlstm, rng, T=10, H=4, K=7, V=5, Hk=2)
    arrays["i"][:, 4], arrays["f"][:, 5], arrays["q"][:, 6] = -np.inf, -1e4, 0.0
    outs, state, made = walk(arrays, {}, False, True)
    others, other, _ = walk(arrays, {}, False, False)
    assert made
    assert np.isfinite(outs).all()
    for mine, theirs in zip([*outs, *state], [*others, *other], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_state_whose_parts_share_memory_is_not_overwritten_too_early():
    rng = np.random.default_rng(2)
    buffer = rng.standard_normal((1, 2, 3, 4))
    arrays = la.testing.sample(la.mlstm, rng, B=(1,), T=1, H=2, K=3, V=3)
    m = np.zeros((1, 2))
    expected = la.mlstm(**arrays, state=(buffer[..., :3].copy(), buffer[..., 3].copy(), m), return_state=True)
    for _ in range(3):
        shared = buffer.copy()
        state = (shared[..., :3], shared[..., 3], m.copy())
        out = la.mlstm(**arrays, state=state, overwrite_state=True)
        np.testing.assert_allclose(out, expected.out, rtol=1e-13)
        np.testing.assert_allclose(state[0], expected.state.S, rtol=1e-13)
        np.testing.assert_allclose(state[1], expected.state.n, rtol=1e-13)
