"""Operators of PyTorch: what torch.compile and torch.export put into their graphs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import linattn_np as la
from tests.bridges.small import RULE
from tests.cases import GROWING, PLAIN, cases_of, draw, one_per, parts, parts_like

torch = pytest.importorskip("torch")
import linattn_np.bridges.torch  # noqa: E402  # a compiler cannot trace the import of the bridge
from linattn_np.bridges.torch import operators  # noqa: E402

SIZES = {"T": 3, "B": (2,), "H": 2, "K": 4, "V": 3}
CACHES = [case for fn in GROWING for case in cases_of(fn)]
FEW = one_per(lambda spec: (spec.erase, spec.readout, spec.micro_steps, spec.state.parts), PLAIN + CACHES)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler


def tensors(case, dtype="float64", **sizes):
    """(arrays, state) as tensors."""
    arrays, state = draw(case, **(SIZES | sizes), dtype=np.dtype(dtype))
    return (
        {n: x if isinstance(x, str) else torch.from_numpy(x) for n, x in arrays.items()},
        parts_like(state, [torch.from_numpy(S) for S in parts(state)]),
    )


def arguments(case, arrays, state, **options):
    """The arguments of the operator."""
    given = [arrays.get(n) if isinstance(arrays.get(n), torch.Tensor) else None for n in case.spec.arrays]
    named = {n: x for n, x in arrays.items() if isinstance(x, str)}
    return *given, parts(state), None, None, None, json.dumps({**case.options, **named, **options})


def rule(**options):
    case = next(c for c in PLAIN if c.fn is RULE)
    arrays, state = tensors(case, **options)
    return list(arrays.values()), state


@pytest.mark.parametrize("case", PLAIN + CACHES, ids=str)
def test_fakes_have_the_shapes_of_the_results(case):
    """And the operator is the public function."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for dtype in ("float32", "float64"):
        arrays, state = tensors(case, dtype)
        options = {**case.options, "return_state": True, "return_states_at": [1, 3]}
        expected = case.fn(**arrays, **options, state=state)
        operators.library()
        found = getattr(torch.ops.linattn_np, case.fn.__name__)(*arguments(case, arrays, state, **options))
        assert all(torch.equal(a, b) for a, b in zip(found, parts(expected), strict=True))
        with FakeTensorMode() as mode:
            fakes = {n: x if isinstance(x, str) else mode.from_tensor(x) for n, x in arrays.items()}
            fake = case.fn(**fakes, **options, state=parts_like(state, [mode.from_tensor(S) for S in parts(state)]))
        assert type(fake) is type(expected)
        for a, b in zip(parts(fake), parts(expected), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def floats(tensors):
    """Those that have gradients: numbers of tokens have none."""
    return [x for x in tensors if x.is_floating_point()]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_opcheck(case):
    """Schema, autograd registration, fakes and their dispatch with symbolic shapes, the backward operator too."""
    arrays, state = tensors(case)
    for x in floats(y for y in (*arrays.values(), *parts(state)) if isinstance(y, torch.Tensor)):
        x.requires_grad_()
    given = arguments(case, arrays, state, return_state=True)
    operators.library()
    name = case.fn.__name__
    for one in (name, f"{name}_saving"):
        checked = torch.library.opcheck(getattr(torch.ops.linattn_np, one), given)
        assert set(checked.values()) == {"SUCCESS"}
    results = getattr(torch.ops.linattn_np, name)(*given)
    plain = [
        [y.detach() for y in x] if isinstance(x, list) else x.detach() if isinstance(x, torch.Tensor) else x
        for x in given
    ]
    backward = getattr(torch.ops.linattn_np, f"{name}_backward")
    checked = torch.library.opcheck(backward, (*plain, [torch.ones_like(x) for x in results[:1]] +
                                               [None] * (len(results) - 1)),
                                    test_utils=("test_schema", "test_faketensor"))  # fmt: skip
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", FEW, ids=str)
def test_gradients_of_the_operator_are_those_of_the_call(case):
    """A part of the state alone has a cotangent, too."""
    arrays, state = tensors(case)
    each = [x.requires_grad_() for x in (*arrays.values(), *parts(state))
            if isinstance(x, torch.Tensor) and x.is_floating_point()]  # fmt: skip
    options = {**case.options, "return_state": True}
    eager = parts(case.fn(**arrays, **options, state=state))
    operators.library()
    traced = getattr(torch.ops.linattn_np, case.fn.__name__)(*arguments(case, arrays, state, **options))
    traced, eager = (floats(found) for found in (traced, eager))
    for chosen in (slice(None), slice(-1, None)):
        total, other = (sum(y.square().sum() for y in found[chosen]) for found in (traced, eager))
        found = torch.autograd.grad(total, each, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(other, each, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_cache_of_sequences_that_a_tracer_does_not_know():
    """Offsets that are numbers are known."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    offsets = torch.tensor([0, 2, 3])
    with FakeTensorMode() as mode:
        q = torch.empty(1, 3, 2, 4)
        _, end = la.softmax_attention(q, q, q, cu_seqlens=(0, 2, 3), return_state=True)
        assert end.k.shape == (2, 2, 2, 4)
        with pytest.raises(
            ValueError,
            match="cu_seqlens is a tensor in a traced call that returns a state, expected a tuple of offsets",
        ):
            la.softmax_attention(q, q, q, cu_seqlens=mode.from_tensor(offsets), return_state=True)


def test_compiled_calls_have_no_graph_breaks():
    x, state = rule(T=4)
    given = [y.requires_grad_() for y in (*x, state)]

    def model(q, k, v, g, beta, S):
        out, S = RULE(2 * q, k, v, g, beta=beta, state=S, scale=0.5, return_state=True)
        read = la.step(RULE, q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state=S)
        first = RULE(*(y.movedim(1, 2) for y in (q, k, v, g, beta)), layout="heads_first")
        return out.sin() + first.movedim(1, 2), S, read

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (4, 3):
        cut = [y[:, :T].detach().requires_grad_() for y in given[:5]] + given[5:]
        results, expected = compiled(*cut), model(*cut)
        grads, wanted = (torch.autograd.grad(sum(y.sum() for y in found), cut) for found in (results, expected))
        for a, b in zip(results + grads, expected + wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in FEW if c.spec.readout.name != "LEVELS"], ids=str)
def test_a_compiled_backward_reads_what_the_forward_kept(case, monkeypatch):
    """It does not compute the forward again, and has the bits of la.vjp; also for one part of the state alone."""
    arrays, state = tensors(case, T=70)
    names, options = [n for n, x in arrays.items() if not isinstance(x, str)], {**case.options, "return_state": True}
    each = [x.requires_grad_(x.is_floating_point()) for x in (*(arrays[n] for n in names), *parts(state))]

    def model(*given):
        own = arrays | dict(zip(names, given, strict=False))
        return parts(case.fn(**own, **options, state=parts_like(state, list(given[len(names) :]))))

    expected, own = floats(model(*each)), floats(each)
    wanted = [torch.autograd.grad(sum(y.square().sum() for y in expected[chosen]), own, retain_graph=True)
              for chosen in (slice(None), slice(-1, None))]  # fmt: skip
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(*each)
    monkeypatch.setattr(operators, "_backward", None)
    for chosen, grads in zip((slice(None), slice(-1, None)), wanted, strict=True):
        total = sum(y.square().sum() for y in floats(compiled(*each))[chosen])
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(total, own), grads, strict=True))


def test_a_copy_of_what_the_forward_kept_is_not_read():
    """The forward is computed again; so it is of arrays elsewhere: a graph may have reused the memory of others."""
    x, state = rule(T=70)
    operators.library()
    given = *x, None, None, [state], None, None, None, json.dumps({"return_state": True})
    out, end, kept = torch.ops.linattn_np.gated_delta_rule_saving(*given)
    assert "pullback" in vars(kept.untyped_storage())
    backward = torch.ops.linattn_np.gated_delta_rule_saved_backward
    expected = torch.ops.linattn_np.gated_delta_rule_backward(*given, [out, end])
    for one in (kept, kept.clone(), torch.zeros(1, dtype=torch.uint8)):
        found = backward(*given, one, [out, end])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    elsewhere = *(y / 2 for y in x), *given[len(x) :]
    expected = torch.ops.linattn_np.gated_delta_rule_backward(*elsewhere, [out, end])
    assert all(torch.equal(a, b) for a, b in zip(backward(*elsewhere, kept, [out, end]), expected, strict=True))
    given = *x, None, None, [state], None, None, None, json.dumps({"return_state": True, "return_states_at": [1, 3]})
    *results, kept = torch.ops.linattn_np.gated_delta_rule_saving(*given)
    expected = torch.ops.linattn_np.gated_delta_rule_backward(*given, results)
    assert all(torch.equal(a, b) for a, b in zip(backward(*given, kept, results), expected, strict=True))


def test_exported_programs_have_one_node_a_call():
    x, _ = rule(T=4)

    class Model(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return RULE(q, k, v, g, beta, return_state=True)

    tokens = torch.export.Dim("T", min=2, max=64)
    program = torch.export.export(Model(), tuple(x), dynamic_shapes=({1: tokens},) * 5)
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert torch.ops.linattn_np.gated_delta_rule.default in calls
    longer = [torch.cat([y, y], 1) for y in x]
    for a, b in zip(program.module()(*longer), Model()(*longer), strict=True):
        assert torch.equal(a, b)


def test_ragged_batches_and_meta_tensors():
    x = [y[:1] for y in rule(T=5)[0]]
    expected = RULE(*x, cu_seqlens=[0, 2, 5], return_state=True)
    for offsets in ([0, 2, 5], torch.tensor([0, 2, 5])):
        found = RULE(*(y.to("meta") for y in x), cu_seqlens=offsets, return_state=True)
        assert [y.shape for y in found] == [y.shape for y in expected]
        assert all(y.is_meta for y in found)
    compiled = torch.compile(
        lambda offsets, *x: RULE(*x, cu_seqlens=offsets, return_state=True), fullgraph=True, backend="aot_eager"
    )
    assert all(torch.equal(a, b) for a, b in zip(compiled(torch.tensor([0, 2, 5]), *x), expected, strict=True))


def test_what_a_traced_call_cannot_have():
    x = [y.to("meta") for y in rule()[0]]
    state = torch.zeros(2, 2, 4, 3, dtype=torch.float64, device="meta")
    with pytest.raises(TypeError, match="gated_delta_rule: overwrite_state=True in a traced call, expected False"):
        RULE(*x, state=state, overwrite_state=True)
    with pytest.raises(TypeError, match="linear_attention: feature_map has a function, expected numbers and words"):
        la.linear_attention(*x[:3], feature_map=(abs_, abs_))
    with pytest.raises(TypeError, match="gated_delta_rule: unknown option 'colour'"):
        RULE(*x, colour=1)


def abs_(x):
    return x


def test_a_second_derivative_of_an_operator_is_an_error():
    x, _ = rule()
    x = [y.requires_grad_() for y in x]
    operators.library()
    out = torch.ops.linattn_np.gated_delta_rule(*x, None, None, [], None, None, None, "{}")[0]
    (gradient,) = torch.autograd.grad(out.sum(), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="gated_delta_rule: a gradient is differentiated again"):
        gradient.sum().backward()
