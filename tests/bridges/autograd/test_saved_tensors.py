"""Gradient checkpointing, hooks for saved tensors, a retained graph: the bits of a plain backward."""

from __future__ import annotations

import pkgutil
import weakref

import pytest

from tests.bridges.autograd.differentiable import RULE, entries, normal, operators

torch = pytest.importorskip("torch")
import linattn_np.bridges as bridges  # noqa: E402
from linattn_np.bridges.torch import calls  # noqa: E402

checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
saved = torch.autograd.graph
ENTRIES = entries("float32", T=20)
OPERATORS = operators("float32")


def summed(entry, given, call=lambda fn, *x: fn(*x)):
    """The entry's loss; call: computes its function."""
    return entry._replace(fn=lambda *x: call(entry.fn, *x)).loss(given)


def plain(entry, given):
    return torch.autograd.grad(summed(entry, given), given)


def hooked(*hooks):
    def grads(entry, given):
        with hooks[0]() if len(hooks) == 1 else saved.saved_tensors_hooks(*hooks):
            loss = summed(entry, given)
        return torch.autograd.grad(loss, given)

    return grads


def reentrant(entry, given):
    """torch.autograd.grad does not go through this mode."""
    summed(entry, given, lambda fn, *x: checkpoint(fn, *x, use_reentrant=True)).backward()
    return [x.grad for x in given]


def retained(entry, given):
    loss = summed(entry, given)
    torch.autograd.grad(loss, given, retain_graph=True)
    return torch.autograd.grad(loss, given)


def without_reentry(entry, given):
    return plain(entry._replace(fn=lambda *x: checkpoint(entry.fn, *x, use_reentrant=False)), given)


WAYS = {
    "checkpoint": without_reentry, "reentrant": reentrant, "save_on_cpu": hooked(saved.save_on_cpu),
    "kept": hooked(lambda x: x, lambda x: x), "copied": hooked(lambda x: x.clone(), lambda x: x.clone()),
    "detached": hooked(lambda x: x.detach(), lambda x: x), "retained": retained,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", ENTRIES + OPERATORS, ids=str)
def test_gradients_have_the_bits_of_a_plain_backward(entry, way):
    expected = plain(entry, entry.given())
    for d, right in zip(WAYS[way](entry, entry.given()), expected, strict=True):
        assert torch.equal(d, right)


def test_every_autograd_function_is_in_the_table():
    """Except that of recorded launches, which tests on a device enter."""
    for module in pkgutil.walk_packages(bridges.__path__, "linattn_np.bridges."):
        if ".cuda" not in module.name and "jax" not in module.name:
            pytest.importorskip(module.name)
    ours, left = set(), [torch.autograd.Function]
    while left:
        left += (found := left.pop().__subclasses__())
        own = [one for one in found if one.__module__.startswith("linattn_np.")]
        ours |= {one.__name__ for one in own if ".cuda" not in one.__module__}
    entered = set()
    for entry in ENTRIES:
        given = entry.given()
        loss = entry.loss(given)
        nodes = [loss.grad_fn, *(d.grad_fn for d in torch.autograd.grad(loss, given, create_graph=True))]
        while nodes:
            if (node := nodes.pop()) is not None and node not in entered:
                entered.add(node)
                nodes += [one for one, _ in node.next_functions]
    assert ours
    assert ours <= {type(node).__name__.removesuffix("Backward") for node in entered}


def test_a_checkpointed_call_holds_nothing_that_its_forward_kept(monkeypatch):
    kept, computed = [], calls.in_tensors

    def watched(*how):
        result, pullback = computed(*how)
        kept.append(weakref.ref(pullback))
        return result, pullback

    monkeypatch.setattr(calls, "in_tensors", watched)
    q, k, v, beta = (normal(1, 70, 2, n) for n in (4, 4, 3, 1))
    given = [q.requires_grad_(), k, v, -v[..., 0].abs(), beta[..., 0].abs()]
    out = RULE(*given)
    assert kept[-1]() is not None
    again = checkpoint(RULE, *given, use_reentrant=False)
    assert kept[-1]() is None
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), q)[0] for y in (out, again)))
    assert len(kept) == 3  # the checkpoint's second forward, and no other, computes again
    assert all(one() is None for one in kept)
