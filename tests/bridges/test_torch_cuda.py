"""PyTorch tensors on a CUDA device: the kernels of the CuPy call, on the caller's stream, captured and replayed."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.call.replay import plans as replay
from tests.bridges.small import RULE
from tests.cases import PLAIN, cotangents, draw, parts, parts_like

pytestmark = pytest.mark.gpu
SIZES = {"T": 70, "B": (2,), "H": 2, "K": 16, "V": 8}
ALIGNED = {"T": 192, "K": 64, "V": 64}  # sizes of calls that launches alone compute, states between chunks too
CASE = next(c for c in PLAIN if c.fn is RULE)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    return torch


def tensor(torch, x):
    """Arrays by name, a state or an array as tensors on the device."""
    if isinstance(x, dict):
        return {n: tensor(torch, y) for n, y in x.items()}
    if x is None or isinstance(x, str):
        return x
    return parts_like(x, [tensor(torch, S) for S in x]) if isinstance(x, tuple) else torch.asarray(x, device="cuda")


def in_dtype(torch, x, dtype):
    """A tensor in a dtype; complex numbers stay as they are."""
    return x if x.is_complex() else x.to(getattr(torch, dtype))


def bits(torch, x):
    """The bytes of a CuPy array or a tensor."""
    if isinstance(x, torch.Tensor):
        return x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return x.get().tobytes()


def arrays_of(torch, dtype, seed=0, **sizes):
    """Tensors of the gated delta rule: q, k, v in `dtype`, gates in float32."""
    arrays, _ = draw(CASE, **(SIZES | sizes), seed=seed, dtype=np.dtype("float32"))
    found = tensor(torch, arrays)
    return {n: x.to(dtype) if n in "qkv" else x for n, x in found.items()}


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_have_the_bits_of_the_cupy_call(torch, case, dtype):
    """First call, replay, pullback, replayed pullback."""
    import cupy

    arrays, state = draw(case, **SIZES, dtype=np.dtype("float32"))
    mine, begin = tensor(torch, arrays), tensor(torch, state)
    mine = {n: x if isinstance(x, str) else in_dtype(torch, x, dtype) for n, x in mine.items()}
    theirs = {n: x if isinstance(x, str) else cupy.from_dlpack(x) for n, x in mine.items()}
    own = parts_like(state, [cupy.from_dlpack(S) for S in parts(begin)])
    options = {**case.options, "return_state": True}
    expected, pullback = la.vjp(case.fn, **theirs, **options, state=own)
    dout, dstate = cotangents(case.fn(**arrays, **options, state=state))
    dout = in_dtype(torch, tensor(torch, dout), dtype)
    dstate = tensor(torch, dstate)
    wanted = pullback(cupy.from_dlpack(dout), parts_like(dstate, [cupy.from_dlpack(S) for S in parts(dstate)]))
    plain = case.fn(**theirs, **options, state=own)
    for _ in range(3):
        out = case.fn(**mine, **options, state=begin)
        result, pull = la.vjp(case.fn, **mine, **options, state=begin)
        grads = pull(dout, dstate)
        for x, y in zip(
            parts(out) + parts(result) + parts(tuple(grads)),
            parts(plain) + parts(expected) + parts(tuple(wanted)),
            strict=True,
        ):
            assert isinstance(x, torch.Tensor)
            assert x.is_cuda
            assert str(x.dtype).removeprefix("torch.") == y.dtype.name
            assert bits(torch, x) == bits(torch, y)


def test_a_repeated_call_is_replayed_without_cupy(torch, monkeypatch):
    from linattn_np.bridges.torch.cuda import views

    x = arrays_of(torch, torch.bfloat16)
    RULE(**x)
    explained = la.explain(RULE, **x)
    assert (explained.backend, explained.replay) == ("cuda", "replayed")
    assert explained.arrays == "CuPy views of torch tensors, on torch's current stream, no tensor requires grad"
    replay.clear()
    expected = RULE(**x, return_state=True)
    RULE(**x, return_state=True)
    monkeypatch.setattr(views, "view", None)
    found = RULE(**x, return_state=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_repeated_gradient_is_replayed_without_cupy(torch, monkeypatch):
    """Arrays by position and by name; the operator's forward, too; a retained graph."""
    from linattn_np.bridges.torch import operators
    from linattn_np.bridges.torch.cuda import views

    x = {n: y.requires_grad_() for n, y in arrays_of(torch, torch.bfloat16, **ALIGNED).items()}
    state, operator = torch.ones(2, 2, 64, 64, device="cuda", requires_grad=True), operators.defined()
    given = [*x.values(), state]

    def gradients():
        out, end = RULE(*list(x.values())[:3], g=x["g"], beta=x["beta"], state=state, return_state=True)
        return torch.autograd.grad(out.float().square().sum() + end.sum(), given)  # of the sum: one element, spread

    def operated():
        plain = [y.detach() for y in x.values()]
        return torch.ops.linattn_np.gated_delta_rule(*plain, None, None, [], None, None, None, "{}")

    replay.clear()
    expected, plain = gradients(), operated()
    for _ in range(2):
        gradients()
        operated()
    monkeypatch.setattr(views, "view", None)
    assert operator
    assert torch.equal(operated()[0], plain[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    total = RULE(*list(x.values())[:3], g=x["g"], beta=x["beta"], state=state, return_state=True).state.sum()
    monkeypatch.undo()
    first = torch.autograd.grad(total, given, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(total, given), first, strict=True))
    x["k"].requires_grad_(False)
    (alone,) = torch.autograd.grad(RULE(**x).float().sum(), x["v"])
    assert alone.shape == x["v"].shape


@pytest.mark.parametrize("hooks", ["host", "transposed"])
def test_saved_tensors_that_a_hook_replaces(torch, hooks):
    """Inputs come back in other memory, or with other strides."""
    x = arrays_of(torch, torch.bfloat16, **ALIGNED)
    x = {n: y.movedim(1, 2).contiguous().movedim(2, 1) for n, y in x.items()} if hooks == "host" else x
    expected = [_gradients(torch, x) for _ in range(3)][-1]

    def pack(y):
        return y.cpu() if hooks == "host" else y.movedim(0, -1).contiguous().movedim(-1, 0)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y.contiguous().cuda()):
        found = _gradients(torch, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_have_the_bits_and_second_derivatives_are_an_error(torch, use_reentrant):
    """Of calls that are not recorded yet, and of recorded ones."""
    from torch.utils.checkpoint import checkpoint

    x = arrays_of(torch, torch.bfloat16, **ALIGNED)
    for _ in range(4):
        given = [y.detach().requires_grad_() for y in x.values()]
        out = checkpoint(lambda *a: RULE(**dict(zip(x, a, strict=True))), *given, use_reentrant=use_reentrant)
        total = out.float().sum()
        plain = RULE(**dict(zip(x, given, strict=True))).float().sum()
        wanted = torch.autograd.grad(plain, given, create_graph=True)
        total.backward()
        assert all(torch.equal(y.grad, d) for y, d in zip(given, wanted, strict=True))
        with pytest.raises(RuntimeError, match="gated_delta_rule: a gradient is differentiated again"):
            torch.autograd.grad(sum(d.float().sum() for d in wanted), given, allow_unused=True)


def test_states_at_positions_are_replayed(torch, monkeypatch):
    """Plain, by vjp, by autograd; another list of positions is another plan."""
    from linattn_np.bridges.torch.cuda import views

    x = arrays_of(torch, torch.bfloat16, **ALIGNED)
    dout = x["v"].clone()

    def calls(positions):
        options = {"return_state": True, "return_states_at": positions}
        result, pullback = la.vjp(RULE, **x, **options)
        grads = pullback(dout, result.state, result.states)
        mine = {n: y.detach().requires_grad_() for n, y in x.items()}
        followed = RULE(**mine, **options)
        d = torch.autograd.grad(tuple(followed), list(mine.values()), (dout, result.state, result.states))
        return [*RULE(**x, **options), *result, *(getattr(grads, n) for n in x), *d]

    each = ([64, 192], (128, 192))
    expected = [calls(positions) for positions in each]
    for positions in each:
        for _ in range(2):
            calls(positions)
    monkeypatch.setattr(views, "view", None)
    for positions, wanted in zip(each, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(calls(positions), wanted, strict=True))
    assert not torch.equal(expected[0][2], expected[1][2])


def test_the_callers_stream(torch):
    """The inputs are written late, by the caller's stream: a kernel on another one would read what was there before."""
    x = arrays_of(torch, torch.bfloat16)
    expected, grads = RULE(**x), _gradients(torch, x)
    stream = torch.cuda.Stream()
    for _ in range(2):
        late = {n: torch.full_like(y, float("nan")) for n, y in x.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            for n, y in x.items():
                late[n].copy_(y)
            out = RULE(**late)
            mine = _gradients(torch, late)
            assert not stream.query()  # nothing waited for the device
        stream.synchronize()
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(mine, grads, strict=True))


def _gradients(torch, x):
    x = {n: y.detach().requires_grad_() for n, y in x.items()}
    return torch.autograd.grad(RULE(**x).float().sum(), list(x.values()))


def test_a_graph_captures_calls(torch):
    """Forward and backward: no synchronisation, and no memory from outside of the graph's pool."""
    x, other = (arrays_of(torch, torch.bfloat16, seed) for seed in (0, 1))
    state = torch.zeros(2, 2, 16, 8, device="cuda")

    def call():
        out, end = RULE(**x, state=state, return_state=True)
        return out, end, *_gradients(torch, x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for n, y in other.items():
        x[n].copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    kept = [y.clone() for y in found]
    assert all(torch.equal(a, b) for a, b in zip(kept, call(), strict=True))


def test_a_state_in_place_in_a_pool_and_its_overlap(torch):
    x = arrays_of(torch, torch.bfloat16, T=1)
    expected = RULE(**x, state=torch.ones(2, 2, 16, 8, device="cuda"), return_state=True)
    for _ in range(3):
        state = torch.ones(2, 2, 16, 8, device="cuda")
        out, end = RULE(**x, state=state, return_state=True, overwrite_state=True)
        assert end is state
        assert torch.equal(state, expected.state)
        assert torch.equal(out, expected.out)
        pool = torch.ones(5, 2, 16, 8, device="cuda")
        rows = torch.tensor([3, 1], device="cuda")
        assert torch.equal(RULE(**x, state=pool, state_rows=rows, overwrite_state=True), expected.out)
        assert torch.equal(pool[rows], expected.state)
        pool = torch.full((5, 2, 16, 8), torch.nan, device="cuda")
        fresh = torch.tensor([True, False], device="cuda")
        out = RULE(**x, state=pool, state_rows=torch.tensor([3, -1], device="cuda"), fresh=fresh, overwrite_state=True)
        zeros = RULE(**x, state=torch.zeros_like(pool[:2]), return_state=True)
        assert torch.equal(out, zeros.out)
        assert torch.equal(pool[3], zeros.state[0])
        assert bool(pool[[0, 1, 2, 4]].isnan().all())


def test_threads_of_their_own(torch):
    """Their memory comes from a pool: nothing but the call itself makes a context current in them."""
    from concurrent.futures import ThreadPoolExecutor

    import cupy

    x = arrays_of(torch, torch.bfloat16, T=200, K=64, V=64)
    theirs, v = {n: cupy.from_dlpack(y) for n, y in x.items()}, x["v"]
    expected, grads = RULE(**x), _gradients(torch, x)

    def of_cupy():
        out, pullback = la.vjp(RULE, **theirs)
        return torch.from_dlpack(out), *map(torch.from_dlpack, parts(tuple(pullback(cupy.from_dlpack(v)))))

    def of_tensors():
        out, pullback = la.vjp(RULE, **x)
        return out, *parts(tuple(pullback(v)))

    for call in (of_cupy, of_tensors, lambda: (RULE(**x), *_gradients(torch, x)), lambda: (RULE(**x),)):
        wanted = call()
        for _ in range(3):
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(call).result()
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(found[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(torch, x), grads, strict=True))


def test_memory_belongs_to_torch(torch):
    """Nothing stays in CuPy's pool; what a call allocates is freed with its results."""
    import cupy

    x = arrays_of(torch, torch.bfloat16)
    for _ in range(2):
        RULE(**x)
    cupy.get_default_memory_pool().free_all_blocks()
    before, used = cupy.get_default_memory_pool().used_bytes(), torch.cuda.memory_allocated()
    out, pullback = la.vjp(RULE, **x)
    pullback(out)
    assert cupy.get_default_memory_pool().used_bytes() == before
    assert torch.cuda.memory_allocated() > used
    del out, pullback
    assert torch.cuda.memory_allocated() == used


def test_strides_offsets_and_slices(torch):
    """Views of tensors: heads first, a slice of packed projections, one that starts off 16 bytes."""
    x = arrays_of(torch, torch.bfloat16)
    expected = RULE(**x)
    packed = torch.cat([x["q"], x["k"], x["v"]], dim=-1)
    parted = dict(zip("qkv", packed.split([16, 16, 8], dim=-1), strict=True))
    for _ in range(2):
        assert torch.equal(RULE(**x | parted), expected)
        first = RULE(**{n: y.movedim(1, 2) for n, y in x.items()}, layout="heads_first")
        assert torch.equal(first.movedim(1, 2), expected)


def test_packed_sequences(torch):
    """Offsets on the host."""
    x = arrays_of(torch, torch.bfloat16, B=(1,))
    offsets = torch.tensor([0, 30, 30, 70])
    out, state = RULE(**x, cu_seqlens=offsets, return_state=True)
    first = RULE(**{n: y[:, :30] for n, y in x.items()}, return_state=True)
    assert torch.equal(out[:, :30], first.out)
    assert torch.equal(state[:1], first.state)
    own = {n: y.requires_grad_() for n, y in x.items()}
    grads = torch.autograd.grad(RULE(**own, cu_seqlens=offsets).float().sum(), list(own.values()))
    assert all(bool(d.isfinite().all()) for d in grads)


def test_float64_gradcheck(torch):
    arrays, state = draw(CASE, T=5, B=(1,), H=2, K=4, V=3)
    names, begin = list(arrays), tensor(torch, state)
    given = [y.requires_grad_() for y in (*tensor(torch, arrays).values(), begin)]

    def call(*each):
        return RULE(**dict(zip(names, each, strict=False)), state=each[-1], return_state=True)

    assert torch.autograd.gradcheck(call, given, fast_mode=True)


def test_compiled_calls(torch):
    import linattn_np.bridges.torch

    assert linattn_np.bridges.torch
    x = {n: y.requires_grad_() for n, y in arrays_of(torch, torch.bfloat16).items()}

    def model(q, k, v, g, beta):
        out, state = RULE(q, k, v, g, beta, return_state=True)
        return out.float().sin(), state

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results, expected = compiled(**x), model(**x)
    grads, wanted = (torch.autograd.grad(sum(y.sum() for y in each), list(x.values())) for each in (results, expected))
    for a, b in zip((*results, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_backward_reads_what_the_forward_kept(torch, monkeypatch):
    """Once its calls are recorded; the bits of la.vjp."""
    from linattn_np.bridges.torch import operators

    x = {n: y.requires_grad_() for n, y in arrays_of(torch, torch.bfloat16, **ALIGNED).items()}
    dout, (_, pullback) = torch.randn_like(x["v"]), la.vjp(RULE, **{n: y.detach() for n, y in x.items()})
    expected = pullback(dout)
    compiled = torch.compile(lambda x: RULE(**x), fullgraph=True, backend="aot_eager")
    for n in range(4):
        if n == 3:
            monkeypatch.setattr(operators, "_backward", None)
        found = torch.autograd.grad(compiled(x), list(x.values()), dout)
        assert all(torch.equal(d, getattr(expected, name)) for name, d in zip(x, found, strict=True))


def test_two_devices_and_the_host(torch):
    x = arrays_of(torch, torch.bfloat16)
    with pytest.raises(TypeError, match=r"gated_delta_rule: k is on device cpu and q on cuda:0, expected all arrays"):
        RULE(**x | {"k": x["k"].cpu()})


def test_jax_arrays_on_the_device():
    jax, cupy = pytest.importorskip("jax"), pytest.importorskip("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no device")
    arrays = draw(CASE, **SIZES, dtype=np.dtype("float32"))[0]
    mine, theirs = ({n: f(x) for n, x in arrays.items()} for f in (jax.numpy.asarray, cupy.asarray))
    expected, pullback = la.vjp(RULE, **theirs)
    for _ in range(3):
        out, pull = la.vjp(RULE, **mine)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(np.asarray(out), expected.get())
        for x, y in zip(parts(tuple(pull(out))), parts(tuple(pullback(expected))), strict=True):
            np.testing.assert_array_equal(np.asarray(x), y.get())
