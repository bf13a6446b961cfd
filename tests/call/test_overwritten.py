"""States that are overwritten: no two elements may share memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.overwrite import check_inputs_disjoint

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, 3, 2, 4)).astype(np.float32)
SHARED = np.lib.stride_tricks.as_strided(np.zeros((1, 1, 4, 4), np.float32), (1, 2, 4, 4), (64, 0, 16, 4))
REFUSED = "elements that share memory"


def test_a_state_whose_heads_share_memory():
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^linear_attention: state has {REFUSED} .*, expected memory of its own"):
            la.linear_attention(Q, Q, Q, state=SHARED, overwrite_state=True)
    assert la.linear_attention(Q, Q, Q, state=SHARED).shape == Q.shape  # read only
    assert (SHARED == 0).all()


def test_each_part_of_a_state():
    how = {"normalize": True, "feature_map": "elu+1", "overwrite_state": True}
    good, z = np.zeros((1, 2, 4, 4), np.float32), np.zeros((1, 2, 4), np.float32)
    with pytest.raises(ValueError, match=rf"^linear_attention: state\.z has {REFUSED}"):
        la.linear_attention(Q, Q, Q, state=(good, np.lib.stride_tricks.as_strided(z, z.shape, (32, 0, 4))), **how)
    with pytest.raises(ValueError, match=r"^linear_attention: state\.S and state\.z share memory, expected"):
        la.linear_attention(Q, Q, Q, state=(good, good[..., 1]), **how)
    buffer = np.zeros((1, 2, 4, 5), np.float32)  # side by side, sharing nothing
    la.linear_attention(Q, Q, Q, state=(buffer[..., :4], buffer[..., 4]), **how)
    assert (buffer != 0).any()


def test_a_tensor_whose_heads_share_memory():
    torch = pytest.importorskip("torch")
    q, state = torch.from_numpy(Q), torch.zeros(1, 1, 4, 4).expand(1, 2, 4, 4)
    with pytest.raises(ValueError, match=f"^linear_attention: state has {REFUSED}"):
        la.linear_attention(q, q, q, state=state, overwrite_state=True)


def test_an_input_on_a_device_is_apart_from_the_state():
    x = SimpleNamespace(shape=(2, 4), strides=(32, 8), dtype=np.dtype(float), data=SimpleNamespace(ptr=1 << 40))
    beside = SimpleNamespace(**vars(x) | {"data": SimpleNamespace(ptr=(1 << 40) + 64)})
    check_inputs_disjoint("kda", {"state": x}, {"q": beside, "g": None})
    with pytest.raises(ValueError, match=r"^kda: state and v share memory, expected a state apart from the inputs"):
        check_inputs_disjoint("kda", {"state": x}, {"q": beside, "v": x})
