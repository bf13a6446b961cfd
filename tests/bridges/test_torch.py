"""PyTorch tensors: the bits of the NumPy call, its recorded plans, and autograd through its pullback."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.bridges.small import FEW, RULE, SIZES
from tests.cases import PLAIN, cotangents, draw, in_dtype, parts, parts_like

torch = pytest.importorskip("torch")


def tensor(x):
    """Arrays by name, a state or an array as tensors."""
    if isinstance(x, dict):
        return {n: tensor(y) for n, y in x.items()}
    if x is None or isinstance(x, str):
        return x
    if isinstance(x, tuple):
        return parts_like(x, [tensor(S) for S in x])
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def bits(x):
    """A tensor or an array as bytes with its dtype."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return str(x.dtype).removeprefix("torch."), x.contiguous().view(torch.uint8).numpy().tobytes()
    return x.dtype.name, np.ascontiguousarray(x).tobytes()


def small(dtype="float32", T=5):
    """Tensors of the gated delta rule."""
    case = next(c for c in PLAIN if c.fn is RULE)
    return tensor(draw(case, **(SIZES | {"T": T}), dtype=np.dtype(dtype))[0])


def requiring(x):
    """Tensors that require grad, float64."""
    return {n: y.double().requires_grad_() if isinstance(y, torch.Tensor) else y for n, y in x.items()}


@pytest.mark.parametrize("follows", [False, True])
def test_the_warning_of_a_layout_names_the_line_of_the_caller(follows):
    q = torch.ones(1, 4, 32, 3, dtype=torch.float64, requires_grad=follows)
    with pytest.warns(UserWarning, match="heads_first") as seen:
        la.linear_attention(q, q, q)
    assert {one.filename for one in seen} == {__file__}


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_tensors_have_the_bits_of_the_numpy_call(case, dtype):
    arrays, state = draw(case, **SIZES, dtype=np.dtype(dtype))
    state = parts_like(state, [in_dtype(S, np.float32) for S in parts(state)])
    options = {**case.options, "state": state, "return_state": True}
    expected, pullback = la.vjp(case.fn, **arrays, **options)
    d = cotangents(expected)
    mine, pull = la.vjp(case.fn, **tensor(arrays), **options | {"state": tensor(state)})
    plain = case.fn(**tensor(arrays), **options | {"state": tensor(state)})
    assert type(mine) is type(expected)
    assert type(mine.state) is type(state) or not isinstance(state, tuple)
    found, wanted = pull(*map(tensor, d)), pullback(*d)
    assert found._fields == wanted._fields
    assert list(map(bits, parts(mine))) == list(map(bits, parts(expected)))
    assert list(map(bits, parts(plain))) == list(map(bits, parts(case.fn(**arrays, **options))))
    assert list(map(bits, parts(tuple(found)))) == list(map(bits, parts(tuple(wanted))))


def test_a_repeated_call_is_replayed():
    x = small()
    RULE(**x)
    explained = la.explain(RULE, **x)
    assert explained.replay == "replayed"
    assert explained.backend == la.explain(RULE, **{n: y.numpy() for n, y in x.items()}).backend
    assert explained.arrays == "NumPy views of torch tensors, no tensor requires grad"
    replay.clear()
    first = RULE(**x)
    assert replay.count() == 1
    assert bits(RULE(**x)) == bits(first)
    assert replay.count() == 1


def test_a_state_is_overwritten_in_place():
    x, state = small(T=1), torch.zeros(2, 2, 4, 3)
    expected = RULE(**x, state=state, return_state=True)
    for _ in range(2):  # computed, replayed
        mine = torch.zeros(2, 2, 4, 3)
        out, end = RULE(**x, state=mine, return_state=True, overwrite_state=True)
        assert end is mine
        assert bits(out) == bits(expected.out)
        assert bits(mine) == bits(expected.state)


def test_offsets_rows_and_layouts():
    x = {n: y[:1] for n, y in small(T=9).items()}
    offsets = torch.tensor([0, 3, 3, 9])
    expected = RULE(**x, cu_seqlens=[0, 3, 3, 9], return_state=True)
    assert list(map(bits, RULE(**x, cu_seqlens=offsets, return_state=True))) == list(map(bits, expected))
    pool = torch.zeros(5, 2, 4, 3)
    out = RULE(**x, cu_seqlens=offsets, state=pool, state_rows=torch.tensor([4, 0, 2]), overwrite_state=True)
    assert bits(out) == bits(expected.out)
    assert bits(pool[[4, 0, 2]]) == bits(expected.state)
    pool = torch.full((5, 2, 4, 3), torch.nan)
    more = {"state_rows": torch.tensor([4, -1, 2]), "fresh": torch.tensor([True, False, True])}
    for call in (RULE, torch.compile(RULE, fullgraph=True, backend="aot_eager")):
        packed = offsets if call is RULE else (0, 3, 3, 9)
        out, end = call(**x, cu_seqlens=packed, state=pool, **more, return_state=True)
        assert bits(out) == bits(expected.out)
        assert bits(end) == bits(expected.state)
    out = RULE(**x, cu_seqlens=offsets, state=pool, **more, overwrite_state=True)
    assert bits(pool[[4, 2]]) == bits(expected.state[[0, 2]])
    assert pool[[0, 1, 3]].isnan().all()
    first = RULE(**{n: y.movedim(1, 2) for n, y in x.items()}, layout="heads_first")
    assert bits(first.movedim(1, 2)) == bits(RULE(**x))


# autograd


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradcheck(case):
    arrays, state = draw(case, **SIZES)
    names = [n for n, x in arrays.items() if not isinstance(x, str)]
    each = [tensor(arrays[n]) for n in names] + [tensor(S) for S in parts(state)]
    each = [x.clone().requires_grad_(x.is_floating_point()) for x in each]

    def call(*given):
        own = arrays | dict(zip(names, given, strict=False))
        result = case.fn(**own, **case.options, state=parts_like(state, list(given[len(names) :])), return_state=True)
        return tuple(parts(result))

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(call, each, fast_mode=True)


def of_floats(grads):
    """The gradients of arrays and parts of the state that have one."""
    return [d for d in parts(tuple(grads)) if d.dtype.kind != "i"]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_autograd_is_the_pullback(case):
    """Bits of la.vjp; the cotangents of out and of one part of the state alone, too."""
    arrays, state = draw(case, **SIZES)
    mine, begin = requiring(tensor(arrays)), parts_like(state, [tensor(S) for S in parts(state)])
    for S in parts(begin):
        S.requires_grad_(S.is_floating_point())
    wanted = [x for x in (*mine.values(), *parts(begin)) if isinstance(x, torch.Tensor)]
    result = case.fn(**mine, **case.options, state=begin, return_state=True)
    expected, pullback = la.vjp(case.fn, **arrays, **case.options, state=state, return_state=True)
    dout, dstate = cotangents(expected)
    last = max(n for n, S in enumerate(parts(dstate)) if S.dtype.kind != "i")
    ends, ds = parts(result)[: last + 2], [dout, *parts(dstate)[: last + 1]]
    wanted = [x for x in wanted if x.requires_grad]
    both = torch.autograd.grad(ends, wanted, list(map(tensor, ds)), retain_graph=True)
    assert list(map(bits, both)) == list(map(bits, of_floats(pullback(dout, dstate))))
    alone = torch.autograd.grad(ends[-1], wanted, tensor(ds[-1]), retain_graph=True)
    zeros = parts_like(dstate, [S if n == last else np.zeros_like(S) for n, S in enumerate(parts(dstate))])
    assert list(map(bits, alone)) == list(map(bits, of_floats(pullback(None, zeros))))


def test_states_at_positions():
    x = requiring(small())
    out, end, states = RULE(**x, return_state=True, return_states_at=[2, 5])
    assert states.shape == (2, 2, 2, 4, 3)
    (out.sum() + end.sum() + states.square().sum()).backward()
    _, pullback = la.vjp(RULE, **{n: y.detach() for n, y in x.items()}, return_state=True, return_states_at=[2, 5])
    grads = pullback(torch.ones_like(out), torch.ones_like(end), 2 * states.detach())
    for n, y in x.items():
        torch.testing.assert_close(y.grad, getattr(grads, n), rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "detached"])
def test_grad_mode_is_respected(mode):
    x = requiring(small())
    expected = RULE(**x)
    assert expected.requires_grad
    if mode == "detached":
        out = RULE(**{n: y.detach() for n, y in x.items()})
    else:
        with getattr(torch, mode)():
            out = RULE(**x)
    assert not out.requires_grad
    assert out.is_inference() == (mode == "inference_mode")
    assert bits(out) == bits(expected)


def test_only_what_requires_grad_gets_a_gradient():
    x = small("float64")
    x["k"].requires_grad_()
    RULE(**x).sum().backward()
    assert x["k"].grad is not None
    assert x["v"].grad is None


def test_positional_and_keyword_arguments_and_parameters():
    x = requiring(small())
    x["v"] = torch.nn.Parameter(x["v"].detach())
    RULE(x["q"], x["k"], x["v"], x["g"], beta=x["beta"]).sum().backward()
    assert all(y.grad is not None for y in x.values())
    with pytest.raises(TypeError, match="gated_delta_rule: q was given twice, by position and by keyword"):
        RULE(x["q"], **x)


def test_a_retained_graph_is_computed_again_and_a_freed_one_is_an_error():
    x = requiring(small())
    out = RULE(**x).sum()
    first = torch.autograd.grad(out, x["k"], retain_graph=True)
    assert bits(torch.autograd.grad(out, x["k"])[0]) == bits(first[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, x["k"])


def test_a_tensor_that_was_changed_in_place_is_an_error():
    x = requiring(small())
    out = RULE(**x).sum()
    with torch.no_grad():
        x["k"][0, 0, 0, 0] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_second_derivative_is_an_error():
    x = requiring(small())
    (gradient,) = torch.autograd.grad(RULE(**x).sum(), x["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule: a gradient is differentiated again, expected first"):
        gradient.sum().backward()


def test_an_overwritten_state_is_not_differentiable():
    x = requiring(small(T=1))
    with pytest.raises(ValueError, match="gated_delta_rule: overwrite_state=True was given to vjp"):
        RULE(**x, state=torch.zeros(2, 2, 4, 3, dtype=torch.float64), overwrite_state=True)


def test_reading_a_step_and_the_influence_matrix():
    x = requiring(small(T=1))
    state = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(la.read, (x["q"], state), fast_mode=True)
    one = [y[:, 0] for y in x.values()]
    assert torch.autograd.gradcheck(
        lambda S, *a: la.step(RULE, *a, state=S, return_state=True), (state, *one), fast_mode=True
    )
    with pytest.raises(TypeError, match="influence_matrix: a tensor requires grad, expected tensors that do not"):
        la.influence_matrix(RULE, **x)
    A = la.influence_matrix(RULE, **{n: y.detach() for n, y in x.items()})
    assert A.shape == (2, 2, 1, 1)


def test_autocast_casts_nothing():
    """q, k and v come from layers that autocast casts, gates are float32: the bits are those without autocast."""
    x = {n: y.bfloat16() if n in "qkv" else y for n, y in small().items()}
    expected = RULE(**x, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = RULE(**x, return_state=True)
        wide = RULE(**small())
    assert list(map(bits, found)) == list(map(bits, expected))
    assert found.state.dtype is wide.dtype is torch.float32
    x = {n: y.requires_grad_() for n, y in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        RULE(**x).sum().backward()
    assert {n: y.grad.dtype for n, y in x.items()} == {n: y.dtype for n, y in x.items()}


# what has no view


def test_other_libraries_beside_tensors():
    x = small()
    with pytest.raises(TypeError, match="gated_delta_rule: k is an array of numpy and q of torch, expected all"):
        RULE(**x | {"k": x["k"].numpy()})
    _, pullback = la.vjp(RULE, **x)
    with pytest.raises(TypeError, match=r"gated_delta_rule: dout is an array of numpy and .* of torch"):
        pullback(x["v"].numpy())


def test_sparse_tensors():
    x = small()
    with pytest.raises(TypeError, match=r"gated_delta_rule: k is a tensor with the layout torch\.sparse_coo"):
        RULE(**x | {"k": x["k"].to_sparse()})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, by torch.func.jvp itself
def test_transforms_of_functions():
    """grad and forward-mode derivatives go through array-API calls; vmap is an error that says what to do."""
    x = {n: y.double() for n, y in small().items()}
    mine = requiring(x)
    RULE(**mine).sum().backward()
    found = torch.func.grad(lambda v: RULE(**x | {"v": v}).sum())(x["v"])
    torch.testing.assert_close(found, mine["v"].grad, rtol=0, atol=1e-14)
    tangent = torch.func.jvp(lambda v: RULE(**x | {"v": v}).sum(), (x["v"],), (torch.ones_like(x["v"]),))[1]
    torch.testing.assert_close(tangent, mine["v"].grad.sum(), rtol=0, atol=1e-13)
    with pytest.raises(TypeError, match=r"gated_delta_rule: v is batched by vmap, expected a batch axis of its own"):
        torch.func.vmap(lambda v: RULE(**x | {"v": v}))(x["v"][None])


def test_explain_says_who_differentiates():
    x = requiring(small())
    assert la.explain(RULE, **x).arrays == "NumPy views of torch tensors, differentiable by torch.autograd"
    with torch.no_grad():
        assert la.explain(RULE, **x).arrays == "NumPy views of torch tensors, no gradient: grad mode is off"


def test_a_thread_of_its_own():
    """Autograd runs a backward in other threads for tensors on a device; grad mode belongs to a thread."""
    from concurrent.futures import ThreadPoolExecutor

    x = requiring(small())
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        out = pool.submit(lambda: RULE(**x)).result()
    assert out.requires_grad
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result()
    assert x["q"].grad is not None


COMPLEX = torch.polar(torch.linspace(0.1, 1.0, 24), torch.linspace(-2.0, 2.0, 24)).reshape(2, 4, 3)
LAZY = {  # tensors that are conjugated or negated when they are read
    "conjugated": (lambda: COMPLEX.conj(), "a"),
    "negated": (lambda: COMPLEX.conj().imag, "x"),
    "one number": (lambda: COMPLEX[:1, :1, :1].conj().imag, "x"),
}


@pytest.mark.parametrize("which", LAZY)
def test_lazily_conjugated_tensors(which):
    """As inputs, states and cotangents, in calls, autograd and pullbacks: the numbers that PyTorch shows."""
    make, name = LAZY[which]
    lazy = make()
    assert lazy.is_conj() or lazy.is_neg()
    x = {"a": COMPLEX, "x": COMPLEX.real} | {name: lazy}
    x = {n: y[: lazy.shape[0], : lazy.shape[1], : lazy.shape[2]] for n, y in x.items()}
    plain = {n: y.resolve_conj().resolve_neg().clone() for n, y in x.items()}
    state = COMPLEX[: lazy.shape[0], 0, : lazy.shape[2]].conj()
    out = la.scan(**plain, state=state.resolve_conj())
    assert bits(la.scan(**x, state=state)) == bits(out)
    one = la.step(la.scan, *(y[:, 0] for y in x.values()), state=state)
    assert bits(one) == bits(la.step(la.scan, *(y[:, 0] for y in plain.values()), state=state.resolve_conj()))
    cotangent = out.conj()
    expected = la.vjp(la.scan, **plain)[1](cotangent.resolve_conj())
    grads = la.vjp(la.scan, **x)[1](cotangent)
    mine = {n: y.clone().requires_grad_() for n, y in plain.items()}
    (la.scan(mine["a"].conj().conj(), mine["x"]) * cotangent.conj()).real.sum().backward()
    for n in x:
        assert torch.equal(getattr(grads, n), getattr(expected, n))
        torch.testing.assert_close(mine[n].grad, getattr(expected, n))


def test_a_lazily_conjugated_state_is_not_overwritten():
    a, state = COMPLEX, COMPLEX[:, 0].conj()
    for call in (lambda **how: la.scan(a, a, **how), lambda **how: la.step(la.scan, a[:, 0], a[:, 0], **how)):
        with pytest.raises(TypeError, match="scan: state is conjugated or negated when it is read, expected one"):
            call(state=state, overwrite_state=True, return_state=True)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    x = small()
    nested = torch.nested.nested_tensor([y.clone() for y in x["k"]], layout=layout)
    text = "is a nested tensor, expected a dense one: the values and offsets of a jagged one are a packed row"
    with pytest.raises(TypeError, match=f"^{RULE.__name__}: k {text}"):
        RULE(**x | {"k": nested})
    with pytest.raises(TypeError, match=f"^rms_norm: x {text}"):
        la.nn.rms_norm(nested)
