"""The pieces in programs of PyTorch and JAX: one operator of a compiled graph, jit and grad, with the bits of vjp."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.foreign import leaves
from tests.nn.table import SMALL, normal

KNOWN = SMALL
FIRST = list({case.name: case for case in reversed(KNOWN)}.values())
every = pytest.mark.parametrize("case", KNOWN, ids=lambda c: f"{c.name} {c.label}".strip())
one_each = pytest.mark.parametrize("case", FIRST, ids=lambda c: f"{c.name} {c.label}".strip())
some = pytest.mark.parametrize(
    "case", [c for c in KNOWN if c.label in ("all", "ragged", "affine", "hidden", "sums")],
    ids=lambda c: f"{c.name} {c.label}",
)  # fmt: skip


def parts(result):
    return [y for y in leaves((result,)) if y is not None]


def wanted(case):
    """The result and the gradients for the cotangents normal(shape)."""
    result, pullback = case.vjp()
    grads = pullback(*[normal(*y.shape) for y in parts(result)])
    return parts(result), [getattr(grads, n) for n in case.arrays]


def tensors(case):
    torch = pytest.importorskip("torch")
    import linattn_np.bridges.torch  # noqa: F401  # torch.compile cannot trace the import in a first call

    arrays = {n: torch.tensor(x).requires_grad_() for n, x in case.arrays.items()}
    return torch, arrays, {n: torch.tensor(x) for n, x in case.whole.items()}


def scored(result, bring):
    return sum((y * bring(normal(*y.shape))).sum() for y in parts(result))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every
def test_a_compiled_graph_has_one_operator_with_the_bits_of_the_call(case):
    torch, arrays, whole = tensors(case)
    seen = []

    def backend(module, _):
        seen.extend(str(node.target) for node in module.graph.nodes if "linattn_np" in str(node.target))
        return module

    def run(call):
        own = {n: x.detach().requires_grad_() for n, x in arrays.items()}
        result = call(own)
        return parts(result), torch.autograd.grad(scored(result, torch.as_tensor), list(own.values()))

    def plain(own):
        return case.fn(**own, **whole, **case.options)

    torch.compiler.reset()
    run(torch.compile(plain, fullgraph=True, backend=backend))
    assert seen == [f"linattn_np.nn_{case.name}"]
    expected = wanted(case)
    for call in (plain, torch.compile(plain, fullgraph=True, backend="aot_eager")):
        for found, exact in zip(run(call), expected, strict=True):
            for a, b in zip(found, exact, strict=True):
                np.testing.assert_array_equal(a.detach().numpy(), b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@some
def test_operators_pass_the_checks_of_torch(case):
    torch, arrays, whole = tensors(case)
    import json

    from linattn_np.bridges.torch import pieces_of_layers

    pieces_of_layers.defined()
    names = [*arrays, *whole]
    options = json.dumps(dict(case.options) | {"arrays": names}, sort_keys=True)
    operator = getattr(torch.ops.linattn_np, f"nn_{case.name}")
    torch.library.opcheck(operator, ([*arrays.values(), *whole.values()], options))


def test_one_case_of_every_piece():
    assert {case.name for case in FIRST} == set(la.nn.__all__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@one_each
def test_an_exported_program_has_the_operator_and_the_bits_of_the_call(case):
    torch, arrays, whole = tensors(case)

    class Model(torch.nn.Module):
        def forward(self, arrays, whole):
            return case.fn(**arrays, **whole, **case.options)

    given = {n: x.detach() for n, x in arrays.items()}, whole
    program = torch.export.export(Model(), given)
    assert [str(n.target) for n in program.graph.nodes if "linattn_np" in str(n.target)] == [
        f"linattn_np.nn_{case.name}.default"]  # fmt: skip
    for a, b in zip(parts(program.module()(*given)), parts(case()), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


@one_each
def test_checkpoints_and_second_derivatives(case):
    """A recomputed forward has the same gradients; a gradient of a gradient is an error."""
    torch, arrays, whole = tensors(case)
    from torch.utils.checkpoint import checkpoint

    def call(*given):
        return scored(case.fn(**dict(zip(arrays, given, strict=True)), **whole, **case.options), torch.as_tensor)

    given = list(arrays.values())
    grads = [torch.autograd.grad(checkpoint(call, *given, use_reentrant=False), given), wanted(case)[1]]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
    first = torch.autograd.grad(call(*given), given, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        first[0].sum().backward()


@every
def test_jit_and_grad_of_jax(case):
    jax = pytest.importorskip("jax")
    options = dict(case.options)

    def loss(arrays):
        return scored(case.fn(**arrays, **whole, **options), jax.numpy.asarray)

    with jax.enable_x64(True):
        whole = {n: jax.numpy.asarray(x) for n, x in case.whole.items()}
        arrays = {n: jax.numpy.asarray(x) for n, x in case.arrays.items()}
        found = jax.jit(jax.grad(loss))(arrays)
        for name, exact in zip(case.arrays, wanted(case)[1], strict=True):
            np.testing.assert_allclose(found[name], exact, rtol=1e-9, atol=1e-9, err_msg=name)


@every
def test_compiled_loops_in_programs_of_jax_have_the_bits_of_the_call(case):
    """backend="numba": jit, grad and vmap call the loops."""
    jax = pytest.importorskip("jax")
    options = dict(case.options) | {"backend": "numba"}
    score = lambda arrays: scored(case.fn(**arrays, **whole, **options), jax.numpy.asarray)  # noqa: E731
    with jax.enable_x64(True):
        whole = {n: jax.numpy.asarray(x) for n, x in case.whole.items()}
        arrays = {n: jax.numpy.asarray(x) for n, x in case.arrays.items()}
        results, expected = wanted(case)
        found = jax.jit(lambda given: case.fn(**given, **whole, **options))(arrays)
        grads = jax.jit(jax.grad(score))(arrays)
        for a, b in zip((*parts(found), *(grads[n] for n in case.arrays)), (*results, *expected), strict=True):
            np.testing.assert_array_equal(a, b)
        two = {n: jax.numpy.stack([x, 0.5 * x]) for n, x in arrays.items()}
        rows = jax.vmap(lambda given: case.fn(**given, **whole, **options))(two)
        for a, b in zip(parts(rows), results, strict=True):
            np.testing.assert_array_equal(a[0], b)
        pulled = jax.jit(lambda given: la.vjp(case.fn, **given, **whole, **options)[1](
            *(jax.numpy.asarray(normal(*y.shape)) for y in results)))(arrays)  # fmt: skip
        for n, b in zip(case.arrays, expected, strict=True):
            np.testing.assert_array_equal(getattr(pulled, n), b)


def test_errors_of_compiled_loops_in_programs_of_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((3, 4))
    run = lambda **options: jax.jit(lambda y: la.nn.silu(y, **options))(x)  # noqa: E731
    with pytest.raises(TypeError, match="silu: out was given with arrays that JAX traces"):
        run(backend="numba", out=np.zeros((3, 4), np.float32))
    with pytest.raises(TypeError, match="silu: out is an array of"):
        jax.jit(lambda y: la.nn.silu(y, out=y))(x)
    second = jax.grad(lambda y: jax.grad(lambda z: la.nn.silu(z, backend="numba").sum())(y).sum())
    with pytest.raises(NotImplementedError, match="silu: a second derivative in JAX"):
        second(x)


def test_out_in_a_traced_call_of_torch_is_an_error():
    torch = pytest.importorskip("torch")
    import linattn_np.bridges.torch  # noqa: F401

    x, y = torch.ones(3, 4), torch.zeros(3, 4)
    with pytest.raises(Exception, match="silu: out was given in a traced call, expected None"):
        torch.compile(lambda a, b: la.nn.silu(a, out=b), fullgraph=True, backend="eager")(x, y)
    with pytest.raises(ValueError, match="silu: out was given to a call that is differentiated"):
        la.nn.silu(x.requires_grad_(), out=y)


UNKNOWN = ("embedding", "cross_entropy", "dropout")  # look at numbers, or draw a mask for all rows


@pytest.mark.parametrize(
    "case", [c for c in KNOWN if c.name not in UNKNOWN], ids=lambda c: f"{c.name} {c.label}".strip()
)
def test_transforms_of_torch_follow_array_calls(case):
    torch, arrays, _ = tensors(case)
    given = tuple(torch.stack([x.detach(), 0.5 * x.detach()]) for x in arrays.values())

    def loss(*each):
        return scored(case.fn(**dict(zip(arrays, each, strict=True)), **case.options), torch.as_tensor)

    found = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(given)))))(*given)
    for d, exact in zip(found, wanted(case)[1], strict=True):
        np.testing.assert_allclose(d[0].numpy(), exact, rtol=1e-9, atol=1e-9)


def test_floats_of_a_compiled_call_may_be_variables():
    """dynamic=True takes options that are attributes for variables."""
    torch = pytest.importorskip("torch")
    import linattn_np.bridges.torch  # noqa: F401
    from linattn_np.ops.gated_norm import GatedNorm

    how, x = GatedNorm(0.25), torch.tensor(normal(2, 7, 6))
    q, k, v = (torch.tensor(normal(2, 7, 2, n)) for n in (3, 3, 4))

    def layer(x, q, k, v):
        eps = how._asdict()["eps"]
        return la.nn.rms_norm(x, eps=eps), la.linear_attention(q, k, v, scale=eps)

    torch.compiler.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(x, q, k, v)
    for a, b in zip(found, layer(x, q, k, v), strict=True):
        assert torch.equal(a, b)
