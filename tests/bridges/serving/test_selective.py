"""mamba_ssm's names of Mamba-1: against the token-by-token loop and torch's own operations, gradients included."""

from __future__ import annotations

import numpy as np
import pytest

from tests.naive import NAIVE

torch = pytest.importorskip("torch")

from linattn_np.bridges.mamba_ssm import mamba_inner_fn, selective_scan_fn, selective_state_update  # noqa: E402

F = torch.nn.functional
B, T, D, N, R, W = 2, 11, 6, 5, 3, 4
close = torch.testing.assert_close


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng((*shape, seed)).standard_normal(shape))


def arrays(groups=None):
    vectors = (B, N, T) if groups is None else (B, groups, N, T)
    return {"u": normal(B, D, T), "delta": normal(B, D, T, seed=1), "A": -normal(D, N).exp(), "B": normal(*vectors),
            "C": normal(*vectors, seed=1), "D": normal(D), "z": normal(B, D, T, seed=2),
            "delta_bias": normal(D, seed=1)}  # fmt: skip


def loop(a, softplus=True, group=None, channels=slice(None)):
    """(out, state) by the loop, of some channels."""
    tokens = {"x": a["u"][:, channels], "dt": a["delta"][:, channels], "z": a["z"][:, channels]}
    rows = {n: a[n] if group is None else a[n][:, group] for n in "BC"}
    given = {n: y.transpose(1, 2).numpy() for n, y in (tokens | rows).items()}
    given |= {n: a[m][channels].numpy() for n, m in (("A", "A"), ("D", "D"), ("dt_bias", "delta_bias"))}
    out, end = NAIVE["selective_scan"](**given, dt_softplus=softplus)
    return torch.from_numpy(out).transpose(1, 2), torch.from_numpy(end)


@pytest.mark.parametrize("softplus", [True, False])
def test_the_scan_is_the_loop(softplus):
    a = arrays()
    out, end = selective_scan_fn(**a, delta_softplus=softplus, return_last_state=True)
    expected, last = loop(a, softplus)
    close(out, expected)
    close(end, last)
    close(selective_scan_fn(**a, delta_softplus=softplus), out)


def test_groups_of_channels_have_vectors_of_their_own():
    a = arrays(groups=2)
    out, end = selective_scan_fn(**a, delta_softplus=True, return_last_state=True)
    for g, channels in enumerate((slice(0, 3), slice(3, 6))):
        expected, last = loop(a, True, g, channels)
        close(out[:, channels], expected)
        close(end[:, channels], last)
    one = arrays(groups=1)
    close(selective_scan_fn(**one), selective_scan_fn(**one | {n: one[n][:, 0] for n in "BC"}))


def test_complex_rates_with_vectors_of_pairs():
    a = arrays()
    vectors = {n: torch.complex(a[n], normal(B, N, T, seed=3)) for n in "BC"}
    A = torch.complex(a["A"], normal(D, N))
    expected = selective_scan_fn(**a | vectors | {"A": A})
    reference = loop(a | vectors | {"A": A}, False)[0]
    close(expected, reference)
    pairs = {n: torch.view_as_real(y).flatten(-2) for n, y in vectors.items()}
    close(selective_scan_fn(**a | pairs | {"A": A}), expected, rtol=1e-5, atol=1e-5)


def test_gradients_through_output_and_last_state():
    a = {n: y.requires_grad_() for n, y in arrays().items()}
    assert torch.autograd.gradcheck(
        lambda *given: selective_scan_fn(*given, delta_softplus=True, return_last_state=True), tuple(a.values())
    )


@pytest.mark.parametrize("pool", [False, True])
def test_steps_are_the_scan(pool):
    a, rows = arrays(), torch.tensor([3, 0])
    whole, end = selective_scan_fn(**a, delta_softplus=True, return_last_state=True)
    state = torch.zeros(5 if pool else B, D, N, dtype=torch.float64)
    for t in range(T):
        token = {"x": a["u"], "dt": a["delta"], "B": a["B"], "C": a["C"], "z": a["z"]}
        out = selective_state_update(
            state, **{n: y[..., t] for n, y in token.items()}, A=a["A"], D=a["D"], dt_bias=a["delta_bias"],
            dt_softplus=True, state_batch_indices=rows if pool else None)  # fmt: skip
        close(out, whole[..., t])
    close(state[rows] if pool else state, end)
    assert not pool or not state[[1, 2, 4]].any()


@pytest.mark.parametrize("norms", [False, True])
def test_the_mixer_between_its_projections(norms):
    a = arrays()
    weights = {"conv1d_weight": normal(D, 1, W), "conv1d_bias": normal(D, seed=4), "out_proj_weight": normal(7, D),
               "x_proj_weight": normal(R + 2 * N, D), "delta_proj_weight": normal(D, R),
               "out_proj_bias": normal(7)}  # fmt: skip
    scales = {f"{n}_rms_weight": normal(R if n == "dt" else N, seed=7) for n in ("b", "c", "dt")} if norms else {}
    xz = normal(B, 2 * D, T)
    more = {n: a[n] for n in ("A", "D", "delta_bias")}
    out = mamba_inner_fn(xz, **weights, **more, **scales)
    x, z = xz.chunk(2, 1)
    x = F.silu(F.conv1d(F.pad(x, (W - 1, 0)), weights["conv1d_weight"], weights["conv1d_bias"], groups=D))
    parts = (x.transpose(1, 2) @ weights["x_proj_weight"].T).split([R, N, N], -1)
    normed = [F.rms_norm(y, y.shape[-1:], scales[f"{n}_rms_weight"], 1e-6) if norms else y
              for n, y in zip(("dt", "b", "c"), parts, strict=True)]  # fmt: skip
    delta = (normed[0] @ weights["delta_proj_weight"].T).transpose(1, 2)
    y, _ = loop(more | {"u": x, "z": z, "delta": delta, "B": normed[1].transpose(1, 2), "C": normed[2].transpose(1, 2)})
    close(out, y.transpose(1, 2) @ weights["out_proj_weight"].T + weights["out_proj_bias"])


@pytest.mark.parametrize(("changed", "text"), [
    ({"B": normal(D, N)}, r"B has shape \(6, 5\), expected \(B, G, N, T\)"),
    ({"C": normal(B, 3, N, T)}, r"C has shape \(2, 3, 5, 11\), expected that of B: \(2, 5, 11\)"),
    ({n: normal(B, 4, N, T) for n in "BC"}, "B has 4 groups and u 6 channels, expected a divisor of 6"),
    ({"delta": normal(B, D, T + 1)}, r"delta has shape \(2, 6, 12\), expected \(B, D, T\) = \(2, 6, 11\)"),
    ({"A": normal(D + 1, N)}, r"A has shape \(7, 5\), expected \(D, N\)"),
])  # fmt: skip
def test_errors_say_what_was_expected(changed, text):
    with pytest.raises(ValueError, match=f"selective_scan_fn: {text}"):
        selective_scan_fn(**arrays() | changed)
