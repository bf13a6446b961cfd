"""The same model, written in torch with its recurrence as a loop, has the same losses."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from bench.cpu.training import Torch, Twin

torch = pytest.importorskip("torch")
V, D, H, LAYERS, STEPS, PEAK = 16, 16, 2, 2, 200, 3e-3
MODEL = la.layers.language_model(V, D=D, layers=LAYERS, heads=H, hidden=20)


def gated_delta_rule(q, k, v, g, beta):
    """S <- e^g (I - beta k k^T) S + beta k v^T"""
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    (B, T, H, K), out = q.shape, []
    S = torch.zeros(B, H, K, v.shape[-1])
    for t in range(T):
        S = g[:, t].exp()[..., None, None] * S
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * error)
        out.append(K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, 1)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch wait for each other longer than these small products take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_losses_of_200_steps_are_those_of_torch():
    text = np.frombuffer(la.layers.__doc__.encode(), np.uint8) % V
    data = la.train.Tokens([text]).batches(2, 17)
    run, rate = la.train.Run.start(MODEL.loss), la.train.cosine(PEAK, STEPS)
    peer = Torch(Twin(H, LAYERS, gated_delta_rule), run)
    for step in range(STEPS):
        peer.step(*data(step), rate(step))
    la.train.fit(MODEL.loss, run, data, STEPS, rate, bar=False)
    assert np.mean(run.losses[-5:]) < run.losses[0] - 0.1
    assert np.allclose(run.losses, peer.losses, rtol=32 * np.finfo(np.float32).eps, atol=0)
