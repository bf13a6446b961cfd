"""The same model, written in torch with its recurrence as a loop, has the same losses."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la

torch = pytest.importorskip("torch")
F = torch.nn.functional
V, D, H, K, LAYERS, STEPS, PEAK = 16, 16, 2, 8, 2, 40, 3e-3
MODEL = la.layers.language_model(V, D=D, layers=LAYERS, heads=H, hidden=20)


def mixer(p, x):
    """gated delta rule: S <- e^g (I - beta k k^T) S + beta k v^T"""
    B, T, _ = x.shape
    q, k, v = (convolved(x @ p[f"{n}/project/weight"], p[f"{n}/conv/weight"]).view(B, T, H, K) for n in "qkv")
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    g = -p["o/A_log"].exp() * F.softplus(x @ p["g/project/weight"] + p["o/dt_bias"])
    beta = torch.sigmoid(x @ p["beta/project/weight"])
    S, out = torch.zeros(B, H, K, K), []
    for t in range(T):
        S = g[:, t].exp()[..., None, None] * S
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * error)
        out.append(K**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    o = normalised(torch.stack(out, 1), p["norm/weight"])
    z = (x @ p["z/project/weight"]).view(B, T, H, K)
    return (o * F.silu(z)).reshape(B, T, H * K) @ p["out/weight"]


def convolved(x, weight):
    width = weight.shape[1]
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2)


def normalised(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def loss_of(P, ids, labels):
    x = P["embedding/weight"][ids]
    for n in range(LAYERS):
        p = {path.removeprefix(f"blocks/{n}/"): y for path, y in P.items() if path.startswith(f"blocks/{n}/")}
        own = {path.removeprefix("mixer/"): y for path, y in p.items() if path.startswith("mixer/")}
        x = x + mixer(own, normalised(x, p["norm1/weight"]))
        h = normalised(x, p["norm2/weight"])
        x = x + (h @ p["mlp/up/weight"] * F.silu(h @ p["mlp/gate/weight"])) @ p["mlp/down/weight"]
    logits = normalised(x, P["norm/weight"]) @ P["head/weight"]
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch wait for each other longer than these small products take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_losses_are_those_of_torch():
    text = np.frombuffer(la.layers.__doc__.encode(), np.uint8) % V
    data = la.train.Tokens([text]).batches(2, 17)
    run, rate = la.train.Run.start(MODEL.loss), la.train.cosine(PEAK, STEPS)
    P = {n: torch.tensor(x, requires_grad=True) for n, x in run.params.arrays.items()}
    groups = [{"params": [x for x in P.values() if (x.ndim > 1) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]  # fmt: skip
    optimiser, losses = torch.optim.AdamW(groups, betas=(0.9, 0.95)), []
    for step in range(STEPS):
        loss = loss_of(P, *map(torch.tensor, data(step)))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(P.values(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate(step)
        optimiser.step()
        losses.append(loss.item())
    la.train.fit(MODEL.loss, run, data, STEPS, rate, bar=False)
    assert np.mean(losses[-5:]) < losses[0] - 0.1
    assert np.allclose(run.losses, losses, rtol=0, atol=2e-6)
