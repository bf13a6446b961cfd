"""causal-conv1d's and mamba_ssm's names: the token-by-token loops, states in and out, packed sequences, gradients."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

from tests.naive import NAIVE

torch = pytest.importorskip("torch")

from linattn_np.bridges import mamba_ssm, modules  # noqa: E402
from linattn_np.bridges.causal_conv1d import causal_conv1d_fn, causal_conv1d_update  # noqa: E402
from linattn_np.ops import norms  # noqa: E402
from linattn_np.testing import relative_error  # noqa: E402

F = torch.nn.functional
B, T, D, W, H, V, G, K = 2, 11, 6, 4, 4, 3, 2, 5


def normal(*shape, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape)).to(dtype)


X, WEIGHT, BIAS = normal(B, D, T), normal(D, W), normal(D)
STATE = normal(B, D, W - 1) + 1
close = torch.testing.assert_close


def by_torch(x, weight, bias, state, activation):
    """torch's convolution of the preceding tokens and x."""
    past = F.pad(x, (W - 1, 0)) if state is None else torch.cat([state, x], -1)
    y = F.conv1d(past, weight[:, None], bias, groups=len(weight))
    return F.silu(y) if activation else y


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("bias", "state"), [(None, None), (BIAS, STATE)], ids=["plain", "all"])
def test_the_convolution_and_its_gradients(bias, state, activation):
    inputs = [x for x in (X, WEIGHT, bias, state) if x is not None]
    found, wanted = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))

    def named(x):
        return (x[0], x[1], x[2] if bias is not None else None, x[-1] if state is not None else None)

    x, weight, b, s = named(found)
    y, end = causal_conv1d_fn(x, weight, b, initial_states=s, return_final_states=True, activation=activation)
    o = by_torch(*named(wanted), activation)
    close(y, o)
    close(end, X[..., -3:])
    dy = normal(B, D, T)
    for grads in zip(torch.autograd.grad(y, found, dy), torch.autograd.grad(o, wanted, dy), strict=True):
        close(*grads)


def test_sequences_of_one_row_are_kept_apart():
    seq_idx = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 4]], dtype=torch.int32)
    x, parts = X.clone().requires_grad_(), X.clone().requires_grad_()
    y = causal_conv1d_fn(x, WEIGHT, BIAS, seq_idx, activation="silu")
    cuts = [(0, 0, 3), (0, 3, 4), (0, 4, T), (1, 0, T - 1), (1, T - 1, T)]
    alone = [causal_conv1d_fn(parts[b : b + 1, :, i:j], WEIGHT, BIAS, activation="silu") for b, i, j in cuts]
    alone = torch.cat([torch.cat(alone[:3], -1), torch.cat(alone[3:], -1)])
    close(y, alone)
    dy = normal(B, D, T)
    close(torch.autograd.grad(y, x, dy), torch.autograd.grad(alone, parts, dy))


@pytest.mark.parametrize("size", [W - 1, W, 6])
def test_updates_of_a_state_are_the_convolution(size):
    whole, state = causal_conv1d_fn(X, WEIGHT, BIAS, activation="silu"), torch.zeros(B, D, size, dtype=X.dtype)
    for t, n in ((0, 1), (1, 1), (2, 3), (5, 6)):
        new = X[..., t : t + n]
        y = causal_conv1d_update(new if n > 1 else new[..., 0], state, WEIGHT, BIAS, "silu")
        close(y if n > 1 else y[..., None], whole[..., t : t + n])
        close(state, F.pad(X, (size, 0))[..., t + n : t + n + size])


def ssm(dtype=torch.float64):
    x, dt, B_, C = normal(B, T, H, V), normal(B, T, H), normal(B, T, G, K), normal(B, T, G, K) + 1
    weights = {"A": -normal(H).exp(), "D": normal(H), "dt_bias": normal(H) - 1}
    return {n: y.to(dtype) for n, y in {"x": x, "dt": dt, "B": B_, "C": C, **weights}.items()}


def test_the_scan_with_its_states():
    a, start = ssm(), normal(B, H, V, K)
    more = {"dt_softplus": True, "dt_limit": (0.0, 0.7)}
    out, end = mamba_ssm.mamba_chunk_scan_combined(**a, chunk_size=8, z=a["x"], initial_states=start,
                                                   return_final_states=True, **more)  # fmt: skip
    arrays = {n: y.numpy() for n, y in a.items()}
    o, S = NAIVE["mamba2"](**arrays, z=arrays["x"], state=start.mT.numpy(), **more)
    np.testing.assert_allclose(out, o, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(end.mT, S, rtol=1e-10, atol=1e-11)


def test_packed_sequences_of_the_scan():
    a = ssm()
    seq_idx = torch.tensor([[0] * 4 + [1] * 7, [2] * 10 + [3]])
    out, ends = mamba_ssm.mamba_chunk_scan_combined(**a, chunk_size=8, seq_idx=seq_idx, return_final_states=True)
    for b, i, j in ((0, 0, 4), (0, 4, T), (1, 0, T - 1), (1, T - 1, T)):
        part = {n: y if n in ("A", "D", "dt_bias") else y[b : b + 1, i:j] for n, y in a.items()}
        o, S = mamba_ssm.mamba_chunk_scan_combined(**part, chunk_size=8, return_final_states=True)
        close(out[b : b + 1, i:j], o)
        if j == T:
            close(ends[b : b + 1], S)
    row = {n: y if n in ("A", "D", "dt_bias") else y[:1] for n, y in a.items()}
    packed = mamba_ssm.mamba_chunk_scan_combined(**row, chunk_size=8, cu_seqlens=torch.tensor([0, 4, T]))
    close(packed, out[:1])


def test_steps_are_the_scan():
    a, state = ssm(), torch.zeros(B, H, V, K, dtype=torch.float64)
    whole = mamba_ssm.mamba_chunk_scan_combined(**a, chunk_size=8, z=a["x"], dt_softplus=True)
    wide = {"A": a["A"][:, None, None].expand(H, V, K), "D": a["D"][:, None].expand(H, V),
            "dt_bias": a["dt_bias"][:, None].expand(H, V)}  # fmt: skip
    for t in range(T):
        x = a["x"][:, t]
        dt, B_, C = a["dt"][:, t, :, None].expand(B, H, V), a["B"][:, t], a["C"][:, t]
        out = mamba_ssm.selective_state_update(state, x, dt, wide["A"], B_, C, wide["D"], x, wide["dt_bias"], True)
        close(out, whole[:, t])


@pytest.mark.parametrize("norm", [True, False])
def test_the_mixer_in_one_call(norm):
    inner, conv = H * V, H * V + 2 * G * K
    zxbcdt, weight, bias = normal(B, T, inner + conv + H), normal(conv, W), normal(conv)
    a, scale, out_proj = ssm(), normal(inner), normal(7, inner)
    more = {"rmsnorm_weight": scale, "rmsnorm_eps": 1e-5} if norm else {}
    out = mamba_ssm.mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, a["dt_bias"], a["A"], a["D"], 8, outproj_weight=out_proj, headdim=V, ngroups=G,
        norm_before_gate=False, **more)  # fmt: skip
    z, xBC, dt = zxbcdt.split([inner, conv, H], -1)
    xBC = F.pad(xBC.mT, (W - 1, 0))
    x, B_, C = F.silu(F.conv1d(xBC, weight[:, None], bias, groups=conv)).mT.split([inner, G * K, G * K], -1)
    arrays = {n: y.numpy() for n, y in {
        "x": x.unflatten(-1, (H, V)), "dt": dt, "B": B_.unflatten(-1, (G, K)), "C": C.unflatten(-1, (G, K)),
        "A": a["A"], "D": a["D"], "dt_bias": a["dt_bias"]}.items()}  # fmt: skip
    y = torch.from_numpy(NAIVE["mamba2"](**arrays, dt_softplus=True)[0]).flatten(2) * F.silu(z)
    if norm:
        groups = y.unflatten(-1, (G, -1))
        y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * scale
    close(out, y @ out_proj.T)


def test_modules_of_fla():
    x, g = normal(B, T, D), normal(B, T, D) + 1
    norm = modules.FusedRMSNormGated(D, activation="sigmoid", dtype=torch.float64)
    assert norm.eps == 1e-5
    with torch.no_grad():
        norm.weight.copy_(normal(D))
    close(norm(x, g), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight * torch.sigmoid(g))
    close(modules.l2norm(1e-3 * x), 1e-3 * x / (1e-6 * x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    y, _ = modules.causal_conv1d(x[:1], WEIGHT, BIAS, x[:1], activation="swish", cu_seqlens=torch.tensor([0, 0, 5, T]))
    parts = [causal_conv1d_fn(part.mT, WEIGHT, BIAS, activation="silu").mT for part in (x[:1, :5], x[:1, 5:])]
    close(y, torch.cat(parts, 1) + x[:1])


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize(
    ("dtype", "power"),
    [
        ("float32", -100),
        ("float32", 60),
        ("float32", 100),
        ("bfloat16", -100),
        ("bfloat16", 100),
        ("float64", -600),
        ("float64", 600),
    ],
)
def test_l2norm_of_quiet_and_loud_rows(dtype, power, eps):
    """The bound of bfloat16 is its rounding of the gradient."""
    x = (normal(B, T, D) * 2.0**power).to(getattr(torch, dtype)).requires_grad_()
    y = modules.l2norm(x, eps, torch.promote_types(x.dtype, torch.float32))
    dy = (normal(B, T, D) + 1).to(y.dtype)
    y.backward(dy)
    exact = [z.detach().double().numpy().astype(np.longdouble) for z in (x, dy)]
    agree = {"float32": 1e-6, "bfloat16": 1e-2, "float64": 1e-14}[dtype]
    assert relative_error(y.detach().numpy(), norms.unit(np, exact[0], eps)) <= min(agree, 1e-6)
    assert relative_error(x.grad.double().numpy(), norms.unit_vjp(np, *exact, eps)) <= agree


def test_signatures_are_those_of_the_packages():
    assert list(inspect.signature(causal_conv1d_fn).parameters) == [
        "x",
        "weight",
        "bias",
        "seq_idx",
        "initial_states",
        "return_final_states",
        "final_states_out",
        "activation",
    ]
    assert list(inspect.signature(mamba_ssm.selective_state_update).parameters) == [
        "state",
        "x",
        "dt",
        "A",
        "B",
        "C",
        "D",
        "z",
        "dt_bias",
        "dt_softplus",
        "state_batch_indices",
        "pad_slot_id",
    ]


@pytest.mark.parametrize(("call", "text"), [
    (lambda: causal_conv1d_fn(X, WEIGHT, activation="gelu"), "activation is 'gelu', expected None, 'silu' or 'swish'"),
    (lambda: causal_conv1d_fn(X, WEIGHT[:-1]), r"weight has shape \(5, 4\), expected \(D, W\) = \(6, W\)"),
    (lambda: causal_conv1d_fn(X, WEIGHT, None, torch.zeros(B, T), STATE), "seq_idx is given together with states"),
    (lambda: modules.rms_norm_gated(X, X, None, prenorm=True), "prenorm is not supported"),
    (lambda: mamba_ssm.mamba_chunk_scan_combined(**ssm(), chunk_size=8, return_varlen_states=True), "not supported"),
    (lambda: mamba_ssm.selective_state_update(normal(B, H, V, K), normal(B, H, V), normal(B, H, V), normal(H, V, K),
                                              normal(B, G, K), normal(B, G, K)), "expected one number of each head"),
])  # fmt: skip
def test_errors_say_what_was_expected(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("kinds", [*itertools.product(("float64", "float32", "bfloat16"), repeat=2)], ids="-".join)
def test_convolutions_are_computed_in_the_wider_dtype_of_x_and_weight(kinds):
    """As with both in float64, to a rounding of the narrower one that is given, and of the result."""
    rng = np.random.default_rng(0)
    x, weight, bias = (torch.from_numpy(rng.standard_normal(n)) for n in ((2, 5, 9), (5, 4), (5,)))
    x, weight, bias = x.to(getattr(torch, kinds[0])), *(y.to(getattr(torch, kinds[1])) for y in (weight, bias))
    wide = causal_conv1d_fn(x.double(), weight.double(), bias.double(), activation="silu")
    bound = 8 * max(torch.finfo(x.dtype).eps, torch.finfo(torch.promote_types(x.dtype, weight.dtype)).eps)
    y = causal_conv1d_fn(x, weight, bias, activation="silu")
    assert y.dtype == x.dtype
    assert float((y.double() - wide).abs().max()) <= bound
    state = x.new_zeros(2, 5, 3)
    one = causal_conv1d_update(x, state, weight, bias, activation="silu")
    assert float((one.double() - wide).abs().max()) <= bound
