"""The short convolution and the gated norm in traced calls: the operators of the pieces of la.nn."""

from __future__ import annotations

import pytest

from tests.bridges.autograd.differentiable import normal

torch = pytest.importorskip("torch")
from linattn_np.bridges import modules  # noqa: E402
from linattn_np.bridges.causal_conv1d import causal_conv1d_fn, causal_conv1d_update  # noqa: E402
from linattn_np.ops.gated_norm import GatedNorm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
B, T, D, W = 2, 5, 6, 4
SEQUENCES = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]])
NORMS = [GatedNorm(1e-5, "silu"), GatedNorm(1e-6, "sigmoid", group=3), GatedNorm(1e-6, "silu", True, 2)]
X, WEIGHT, BIAS, GATE = normal(B, D, T), normal(D, W), normal(D), normal(B, T, D)


def convolutions():
    def with_all(x, w, b, s):
        return causal_conv1d_fn(x, w, b, initial_states=s, return_final_states=True, activation="silu")

    def packed(x, w, b):
        return causal_conv1d_fn(x, w, b, SEQUENCES, activation="swish")

    return {"plain": (causal_conv1d_fn, (X, WEIGHT)), "packed": (packed, (X, WEIGHT, BIAS)),
            "states": (with_all, (X, WEIGHT, BIAS, normal(B, D, W - 1)))}  # fmt: skip


def norms():
    return {
        f"norm {n}": (lambda *a, how=how: modules.gated_rms_norm(*a, how), (X.mT, GATE, BIAS))
        for n, how in enumerate(NORMS)
    } | {"no weight": (modules.rms_norm_gated, (X.mT, GATE, None))}


CALLS = convolutions() | norms()


def graph(fn, given, **options):
    """(the targets of a graph's nodes, the result and the gradients of a compiled call)."""
    seen = []

    def backend(module, _):
        seen.append([node.target for node in module.graph.nodes])
        return module

    def run(call):
        given_again = [None if x is None else x.detach().requires_grad_() for x in given]
        found = call(*given_again)
        results = found if isinstance(found, tuple) else (found,)
        each = [x for x in given_again if x is not None]
        return *results, *torch.autograd.grad(sum(y.square().sum() for y in results), each)

    torch.compiler.reset()
    run(torch.compile(fn, fullgraph=True, backend=backend, **options))
    return seen, run(torch.compile(fn, fullgraph=True, backend="aot_eager", **options)), run(fn)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_one_graph_with_the_bits_of_the_call(name, dtype):
    """One operator in it."""
    fn, tensors = CALLS[name]
    given = [None if x is None else x.to(getattr(torch, dtype)) for x in tensors]
    (targets,), found, expected = graph(fn, given)
    assert len([one for one in targets if "linattn_np" in str(one)]) == 1
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_sizes_of_a_compiled_call_may_change():
    def layer(x, weight, bias, gate):
        y = causal_conv1d_fn(x, weight, bias, activation="silu").mT
        return modules.gated_rms_norm(y, gate, bias, NORMS[0])

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (7, 3):
        given = normal(B, D, T), WEIGHT, BIAS, normal(B, T, D)
        assert torch.equal(compiled(*given), layer(*given))


def test_exported_programs_have_one_node_a_call():
    class Layer(torch.nn.Module):
        def forward(self, x, gate):
            y = causal_conv1d_fn(x, WEIGHT, BIAS, activation="silu").mT
            return modules.gated_rms_norm(y, gate, BIAS, NORMS[0])

    tokens = torch.export.Dim("T", min=2, max=64)
    program = torch.export.export(Layer(), (X, GATE), dynamic_shapes=({2: tokens}, {1: tokens}))
    targets = [node.target for node in program.graph.nodes]
    ours = torch.ops.linattn_np
    assert {ours.nn_short_conv.default, ours.nn_gated_norm.default} <= {*targets}
    longer = normal(B, D, 9), normal(B, 9, D)
    assert torch.equal(program.module()(*longer), Layer()(*longer))


def test_a_compiled_update_writes_the_state_in_its_place():
    torch.compiler.reset()
    update = torch.compile(causal_conv1d_update, fullgraph=True, backend="aot_eager")
    states = [normal(B, D, W - 1) for _ in range(2)]
    found = [call(X[..., 0], S, WEIGHT, BIAS, "silu")
             for call, S in zip((update, causal_conv1d_update), states, strict=True)]  # fmt: skip
    assert torch.equal(*found)
    assert torch.equal(*states)


@pytest.mark.parametrize("name", ["plain", "states", "norm 0", "norm 2"])
def test_transforms_of_functions_follow_torch_operations(name):
    """vmap too: there is a batch of everything."""
    fn, given = CALLS[name]
    many = [torch.stack([x, x + 1]) for x in given]

    def loss(*each):
        found = fn(*each)
        return sum(y.square().sum() for y in (found if isinstance(found, tuple) else (found,)))

    found = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(given)))))(*many)
    for n in range(2):
        one = [x[n].requires_grad_() for x in many]
        for a, b in zip(found, torch.autograd.grad(loss(*one), one), strict=True):
            torch.testing.assert_close(a[n], b)


def test_meta_tensors():
    x, gate = X.to("meta"), GATE.to("meta")
    assert causal_conv1d_fn(x, WEIGHT.to("meta"), BIAS.to("meta"), activation="silu").shape == X.shape
    assert modules.gated_rms_norm(x.mT, gate, BIAS.to("meta"), NORMS[0]).shape == gate.shape
