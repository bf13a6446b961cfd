"""FLA's names: every function against the token-by-token loops, by FLA's formulas, layouts, defaults and states."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.types import Decay
from tests.naive import NAIVE

torch = pytest.importorskip("torch")

from linattn_np.bridges import fla  # noqa: E402

B, T, H, K, V, M = 2, 7, 2, 4, 3, 5
RNG = np.random.default_rng(0)
VECTORS = {"q": K, "k": K, "v": V, "p": K, "w": K, "r": K, "a": K, "kk": K, "gk": K, "s": M}


OURS = {
    "linear_attn": "linear_attention",
    "lightning_attn": "lightning_attention",
    "dplr_delta_rule": "dplr",
    "iplr_delta_rule": "iplr",
    "gated_delta_product": "delta_product",
    "precond_gated_delta_rule": "preconditioned_gated_delta_rule",
    "precond_kda": "preconditioned_kda",
}  # where the names differ


def variant(fn):
    """Our name of FLA's function."""
    for form in ("fused_mul_recurrent_", "fused_recurrent_", "fused_chunk_", "chunk_"):
        fn = fn.removeprefix(form)
    return OURS.get(fn, fn)


def array_of(fn, name, heads=H):
    """An input of FLA's function by its parameter's name."""
    decay = name in ("g", "gk", "gv", "g_atk") or (name == "w" and "rwkv" in fn)
    by_channel = bool(fn) and getattr(la, variant(fn)).spec.decay is Decay.VECTOR
    width = {"g": K if by_channel else None, "gv": V}.get(name, VECTORS.get(name))
    if "gsa" in fn and name == "g":
        width = M
    if "gdn2" in fn:
        width = {"w": V, "b": K}.get(name, width)
    elif name == "b":
        width = K
    x = RNG.standard_normal((B, T, heads) if width is None else (B, T, heads, width))
    if decay:
        return -np.abs(x)
    if name in ("beta", "beta_atk") or ("gdn2" in fn and name in ("b", "w")):
        return 1 / (1 + np.exp(-x))
    return 0.4 * x if name in ("k", "p", "a", "b", "kk") else x


def inputs(fn):
    """The required arrays and options of a function."""
    found = {}
    for name, p in inspect.signature(fla.FUNCTIONS[fn]).parameters.items():
        if name in ("scale", "layer_idx", "num_layers", "num_householder"):
            continue
        if p.default is inspect.Parameter.empty or name in ("g", "gk", "beta", "g_atk", "beta_atk"):
            found[name] = RNG.standard_normal((H, K)) if name == "u" else array_of(fn, name)
    if "gated_delta_rule" in fn:
        found.pop("gk", None)
    if "lightning" in fn:
        found |= {"layer_idx": 1, "num_layers": 4}
    if "product" in fn:
        for name in ("k", "v", "beta"):
            steps = RNG.uniform(0.5, 1, (2 * T, 1, *[1] * (found[name].ndim - 3)))
            found[name] = np.repeat(found[name], 2, axis=1) * steps
        found["num_householder"] = 2
    return found


def expected(fn, x, state):
    """(o, final state) by the loops, from FLA's formulas."""
    name, options, a = variant(fn), {"state": state, "scale": K**-0.5}, dict(x)
    if name == "linear_attention":
        options |= {"normalize": "recurrent" not in fn, "eps": 1e-10}
    if name == "lightning_attention":
        a = {n: a[n] for n in "qkv"} | {"slopes": 8 / H * np.arange(H) * (1 - 1 / 4)}
    if name == "retention":
        a["g"] = np.log(1 - 2.0 ** (-5 - np.arange(H)))
    if "rwkv" in name:
        a = {"q": a.pop("r"), "g": a.pop("w")} | a
    if fn == "fused_mul_recurrent_rwkv7":
        a = {n: a[n] for n in ("q", "g", "k", "v")} | {"a": -a["kk"], "b": a["kk"] * a["a"]}
    if fn in ("chunk_rwkv7", "fused_mul_recurrent_rwkv7"):
        options["scale"] = 1.0
    if "precond" in fn:
        a |= {n: unit(a[n]) for n in ("q", "k")} | {"g_square": a.pop("g_atk"), "beta_square": a.pop("beta_atk")}
    if "gk" in a:
        a["g"] = a.pop("gk")
    if name == "delta_product":
        a.pop("num_householder")
        a |= {n: a[n].reshape(B, T, 2, *a[n].shape[2:]) for n in ("k", "v", "beta")}
    return NAIVE[name](**a, **options)


def tensors(x):
    return {n: torch.from_numpy(y) if isinstance(y, np.ndarray) else y for n, y in x.items()}


def state_for(fn):
    """(FLA's initial states by name, the loops')."""
    S = RNG.standard_normal((B, H, K, V))
    if "gsa" in fn:
        W, S = RNG.standard_normal((B, H, K, M)), RNG.standard_normal((B, H, M, V))
        return {"initial_state": (torch.from_numpy(W), torch.from_numpy(S))}, (S, W)
    if "linear_attn" in fn and "recurrent" not in fn:
        z = 5 + RNG.random((B, H, K))
        return {"initial_state": (torch.from_numpy(S), torch.from_numpy(z[:, None]))}, (S, z)
    if "precond" in fn:
        A = RNG.random((B, H, K))
        return tensors({"initial_state": S, "initial_A_state": A}), (S, A)
    return {"initial_state": torch.from_numpy(S)}, S


@pytest.mark.parametrize("fn", fla.FUNCTIONS)
def test_every_function_is_its_formula(fn):
    x = inputs(fn)
    if "linear_attn" in fn:  # sums of similarities far from 0
        x |= {n: np.abs(x[n]) for n in "qk"}
    theirs, ours = state_for(fn)
    out, *state = fla.FUNCTIONS[fn](**tensors(x), **theirs, output_final_state=True)
    state = state[0] if len(state) == 1 else tuple(state)
    o, S = expected(fn, x, ours)
    np.testing.assert_allclose(out, o, rtol=1e-10, atol=1e-11)
    states = [state, S]
    if isinstance(state, tuple):
        second = S[1][:, None] if "linear" in fn else S[1]
        states = [list(state), list(S[::-1] if "gsa" in fn else (S[0], second))]
    for a, b in zip(*(y if isinstance(y, list) else [y] for y in states), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)
    listed = list(inspect.signature(fla.FUNCTIONS[fn]).parameters)[: len(x)]
    in_order = listed == list(x)
    assert in_order == (not fn.startswith("fused_recurrent") or "gated_delta" not in fn)  # gk, gv after g
    alone = fla.FUNCTIONS[fn](*(tensors(x).values() if in_order else ()), **({} if in_order else tensors(x)),
                              output_final_state=False)  # fmt: skip
    assert alone[1:] == (None,) * (len(alone) - 1)
    np.testing.assert_allclose(alone[0], expected(fn, x, None)[0], rtol=1e-10, atol=1e-11)


def rule(**more):
    """Inputs of the gated delta rule as tensors, twice as many value heads."""
    x = {n: array_of("", n, 2 * H if n in ("v", "g", "beta") else H) for n in ("q", "k", "v", "g", "beta")}
    return tensors(x | more)


def unit(x):
    return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("T1", [1, 7])
def test_the_norm_of_q_and_k_has_its_eps_inside_the_root(T1):
    x = {n: y[:, :T1] * (1e-3 if n in "qk" else 1) for n, y in rule().items()}
    out, _ = fla.chunk_gated_delta_rule(**x, use_qk_l2norm_in_kernel=True)
    a = {n: y.numpy() for n, y in x.items()}
    o, _ = NAIVE["gated_delta_rule"](**(a | {"q": unit(a["q"]), "k": unit(a["k"])}))
    np.testing.assert_allclose(out, o, rtol=1e-12, atol=1e-13)


def test_gates_and_strengths_by_their_formulas():
    x = rule()
    raw, logits = (torch.from_numpy(RNG.standard_normal((B, T, 2 * H))) for _ in range(2))
    A_log, dt_bias = (torch.from_numpy(RNG.standard_normal(2 * H)) for _ in range(2))
    out, _ = fla.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], raw, logits, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)  # fmt: skip
    g = -torch.exp(A_log) * torch.nn.functional.softplus(raw + dt_bias)
    o, _ = fla.chunk_gdn(**(x | {"g": g, "beta": 2 * torch.sigmoid(logits)}))
    torch.testing.assert_close(out, o, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_gate_of_kda(bound):
    x = tensors({n: array_of("chunk_kda", n) for n in ("q", "k", "v", "beta")})
    raw, A_log, bias = (torch.from_numpy(RNG.standard_normal(s)) for s in ((B, T, H, K), H, H * K))
    out, _ = fla.chunk_kda(g=raw, **x, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, lower_bound=bound)
    inner = raw + bias.reshape(H, K)
    g = (-torch.exp(A_log)[:, None] * torch.nn.functional.softplus(inner) if bound is None
         else bound * torch.sigmoid(torch.exp(A_log)[:, None] * inner))  # fmt: skip
    torch.testing.assert_close(out, fla.fused_recurrent_kda(g=g, **x)[0], rtol=1e-12, atol=1e-13)
    x |= tensors({n: array_of("", n) for n in ("g_atk", "beta_atk")})
    raw_gate = {"g": raw, "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias, "lower_bound": bound}
    out, _, _ = fla.chunk_precond_kda(**x, **raw_gate)
    torch.testing.assert_close(out, fla.fused_recurrent_precond_kda(g=g, **x)[0], rtol=1e-12, atol=1e-13)


PRECONDITIONED = [name for name in fla.FUNCTIONS if "precond" in name]


def preconditioned(fn, per_key=1, heads=H):
    """(arrays of keys' heads, arrays with `per_key` heads of values for each) as tensors."""
    names = [n for n in inputs(fn) if n not in ("q", "k", "g_atk", "beta_atk")]
    keys = {n: array_of(fn, n, heads) for n in ("q", "k", "g_atk", "beta_atk")}
    return tensors(keys | {n: array_of(fn, n, heads * per_key) for n in names})


@pytest.mark.parametrize("more", [{}, {"x": 2.0, "eps": 0.1}], ids=str)
@pytest.mark.parametrize("fn", PRECONDITIONED)
def test_heads_of_values_share_the_preconditioner_of_their_key(fn, more):
    """Packed, states with values first, one center a head of keys; A is that of each head of keys."""
    x = {n: y[:1] for n, y in preconditioned(fn, 2).items()}
    center, cuts = torch.from_numpy(RNG.standard_normal(H)), torch.tensor([0, 3, T])
    S, A = torch.from_numpy(RNG.standard_normal((2, 2 * H, V, K))), torch.from_numpy(RNG.random((2, H, K)))
    given = more | {"cu_seqlens": cuts, "log_atk_scale": center, "output_final_state": True}
    out, *end = fla.FUNCTIONS[fn](**x, **given, initial_state=S, initial_A_state=A, transpose_state_layout=True)
    wide = {n: y.repeat_interleave(2, 2) if n.endswith("atk") else y for n, y in x.items()}
    a = {n.replace("_atk", "_square"): y.numpy() for n, y in wide.items()}
    a |= {n: unit(a[n]) for n in ("q", "k")} | {"center": center.repeat_interleave(2, 0).numpy()}
    options = {"span" if n == "x" else n: y for n, y in more.items()}
    for n, (start, stop) in enumerate(((0, 3), (3, T))):
        part = {m: y if m == "center" else y[:, start:stop] for m, y in a.items()}
        begin = S[n : n + 1].mT.numpy(), A[n : n + 1].repeat_interleave(2, 1).numpy()
        o, (S1, A1) = NAIVE[variant(fn)](**part, **options, state=begin)
        np.testing.assert_allclose(out[:, start:stop], o, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(end[0][n : n + 1].mT, S1, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(end[1][n : n + 1], A1[:, ::2], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("fn", PRECONDITIONED)
def test_either_state_of_a_preconditioned_rule_may_be_missing_or_overwritten(fn):
    x = preconditioned(fn, 2)
    both = {"initial_state": torch.zeros(B, 2 * H, K, V).double(), "initial_A_state": torch.zeros(B, H, K).double()}
    expected = fla.FUNCTIONS[fn](**x, output_final_state=True)
    for names in (both.keys(), ("initial_state",), ("initial_A_state",)):
        for more in ({}, {"overwrite_state": True}):
            given = {n: both[n].clone() for n in names}
            found = fla.FUNCTIONS[fn](**x, **given, **more, output_final_state=True)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            for n, y in given.items():
                assert (y is found[1 if n == "initial_state" else 2]) == bool(more)
                assert bool(y.any()) == bool(more)


@pytest.mark.parametrize("fn", PRECONDITIONED)
def test_gradients_of_a_preconditioned_rule_reach_every_input(fn):
    x = preconditioned(fn, 2)
    shapes = {"initial_state": (B, 2 * H, K, V), "initial_A_state": (B, H, K), "log_atk_scale": (H,)}
    x |= {n: torch.from_numpy(RNG.random(shape)) for n, shape in shapes.items()}

    def loss(*given):
        o, S, A = fla.FUNCTIONS[fn](**dict(zip(x, given, strict=True)), output_final_state=True)
        return o.square().sum() + S.sum() + A.square().sum()

    given = [y[:, :3] if y.ndim > 2 and y.shape[1] == T else y for y in x.values()]
    assert torch.autograd.gradcheck(loss, [y.requires_grad_() for y in given], eps=1e-6, atol=1e-5, rtol=1e-5)


def test_packed_sequences_and_states_with_values_first():
    x = {n: y[:1] for n, y in rule().items()}
    cuts, start = [0, 2, 2, 7], torch.from_numpy(RNG.standard_normal((3, 2 * H, V, K)))
    out, state = fla.chunk_gated_delta_rule(**x, cu_seqlens=torch.tensor(cuts), initial_state=start, state_v_first=True,
                                            output_final_state=True)  # fmt: skip
    assert state.shape == start.shape
    torch.testing.assert_close(state[1], start[1])  # empty
    for n in (0, 2):
        part = {name: y[:, cuts[n] : cuts[n + 1]] for name, y in x.items()}
        o, S = fla.fused_recurrent_gated_delta_rule(**part, initial_state=start[n : n + 1].mT, output_final_state=True)
        torch.testing.assert_close(out[:, cuts[n] : cuts[n + 1]], o, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state[n : n + 1].mT, S, rtol=1e-12, atol=1e-13)


def test_gradients_reach_every_input():
    x = {n: y.requires_grad_() for n, y in rule().items()}
    start = torch.zeros(B, 2 * H, K, V, dtype=torch.float64, requires_grad=True)

    def loss(*given):
        o, S = fla.chunk_gated_delta_rule(*given[:5], initial_state=given[5], output_final_state=True,
                                          use_qk_l2norm_in_kernel=True)  # fmt: skip
        return o.square().sum() + S.sum()

    assert torch.autograd.gradcheck(loss, (*x.values(), start), eps=1e-6, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_results(dtype):
    x = {n: y.to(torch.float32 if n == "g" else dtype) for n, y in rule().items()}
    out, state = fla.chunk_gated_delta_rule(**x, output_final_state=True)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)


def test_a_step_may_overwrite_its_state():
    x = {n: y[:, :1].float() for n, y in rule().items()}
    start = torch.zeros(B, 2 * H, K, V)
    out, state = fla.fused_recurrent_gated_delta_rule(**x, initial_state=start, output_final_state=True,
                                                      overwrite_state=True)  # fmt: skip
    o, S = fla.fused_recurrent_gated_delta_rule(**x, output_final_state=True)
    assert state is start
    torch.testing.assert_close(start, S)
    torch.testing.assert_close(out, o)


@pytest.mark.parametrize(("fn", "more", "error", "text"), [
    ("chunk_gated_delta_rule", {"cp_context": object()}, ValueError, "cp_context is not supported, expected None"),
    ("chunk_gated_delta_rule", {"head_first": True}, TypeError, "unknown argument head_first, expected one of q, k"),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ValueError, "without use_beta_sigmoid_in_kernel=True"),
    ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, ValueError, "without A_log, expected A_log"),
    ("fused_recurrent_gated_delta_rule", {"gk": 1}, ValueError, "gk is given, expected g"),
    ("chunk_gated_delta_rule", {"v": None}, TypeError, "v"),
    ("chunk_precond_kda", {"cp_context": 1}, ValueError, "cp_context is not supported, expected None"),
    ("chunk_precond_kda", {"return_intermediate_states": True}, ValueError, "return_intermediate_states is not supp"),
    ("chunk_precond_kda", {"use_qk_l2norm_in_kernel": False}, ValueError, "in_kernel is False, expected True"),
    ("chunk_precond_kda", {"use_gate_in_kernel": True}, ValueError, "without A_log, expected A_log"),
    ("chunk_precond_kda", {"x": 0.5}, ValueError, "span is 0.5, expected a finite number >= 1"),
    ("chunk_precond_kda", {"log_atk_scale": 1.0}, TypeError, "log_atk_scale is 1.0, expected a tensor"),
    ("chunk_precond_kda", {"initial_A_state": torch.zeros(2)}, ValueError, r"initial_A_state has shape \(2,\)"),
    ("chunk_precond_kda", {"initial_state": (1, 2)}, TypeError, "initial_state is .*, expected a tensor$"),
    ("fused_recurrent_precond_gated_delta_rule", {"gk": 1}, ValueError, "gk is given, expected g"),
    ("fused_recurrent_precond_gated_delta_rule", {"g_atk": None}, ValueError, r"g_atk is None, expected \(B, T, H\)"),
])  # fmt: skip
def test_errors_say_what_was_expected(fn, more, error, text):
    with pytest.raises(error, match=text):
        fla.FUNCTIONS[fn](**((preconditioned(fn) if "precond" in fn else rule()) | more))


def test_arguments_are_bound_as_python_does():
    x = list(rule().values())
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: g, beta not given"):
        fla.chunk_gated_delta_rule(*x[:3])
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: q is given twice"):
        fla.chunk_gated_delta_rule(*x, q=x[0])
    assert list(inspect.signature(fla.chunk_gdn).parameters)[:9] == [
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
    ]
    assert fla.chunk_gla.__name__ == "chunk_gla"
