"""Layers on tensors: the gradient that torch composes equals the pullbacks composed here."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from tests.layers.test_mixers import drawn, small, tokens

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mamba2", "rwkv7", "comba", "softmax_attention"])
def test_autograd_composes_the_same_gradient(name):
    model, (ids, labels) = small(name), tokens()
    params = drawn(model)
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in params.items()}
    loss = model.loss(tensors, torch.tensor(ids), torch.tensor(labels))
    loss.backward()
    ours, pullback = la.vjp(model.loss, params, ids, labels)
    assert np.isclose(float(loss.detach()), ours, rtol=1e-12)
    for n, d in pullback(1.0).params.items():
        assert np.allclose(tensors[n].grad.numpy(), d, rtol=1e-8, atol=1e-10), n
