"""Pools, rings and states of the adapters: what engines pass at every step, against the dense calls."""

from __future__ import annotations

import pytest

from tests.bridges.serving import test_ssm_and_conv as drawn

torch = pytest.importorskip("torch")

from linattn_np.bridges.causal_conv1d import causal_conv1d_fn, causal_conv1d_update  # noqa: E402
from linattn_np.bridges.mamba_ssm import selective_state_update  # noqa: E402
from linattn_np.bridges.modules import causal_conv1d  # noqa: E402

normal, close = drawn.normal, torch.testing.assert_close
N, D, W, H, V, G, K = 4, 6, 4, 4, 3, 2, 5
ROWS = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
OWNED, OTHERS = [0, 2], [1, 2, 3, 4, 6]


def pool_of(*shape):
    """Seven states; rows without an owner are NaN."""
    pool = normal(7, *shape)
    pool[OTHERS] = torch.nan
    return pool


def begin(pool, rows=ROWS):
    state = pool[rows.long().clamp(min=0)]
    state[rows < 0] = 0
    return state


def check_pool(pool, before, end):
    assert torch.equal(pool[[5, 0]], end[OWNED])
    assert torch.equal(pool[OTHERS].nan_to_num(7), before[OTHERS].nan_to_num(7))


@pytest.mark.parametrize("S", [3, 5])
@pytest.mark.parametrize("T", [None, 0, 1, 7])
@pytest.mark.parametrize("ring", [False, True])
def test_rows_of_the_convolution(T, ring, S):
    x, weight, bias, pool = normal(N, D, *([] if T is None else [T])), normal(D, W), normal(D), pool_of(D, S)
    how = {"activation": "silu", "cache_seqlens": torch.tensor([0, 2, 9, 4]) if ring else None}
    dense, before = begin(pool), pool.clone()
    expected = causal_conv1d_update(x, dense, weight, bias, **how)
    assert torch.equal(causal_conv1d_update(x, pool, weight, bias, conv_state_indices=ROWS, **how), expected)
    check_pool(pool, before, dense)
    pads, pool = torch.where(ROWS < 0, 99, ROWS), before.clone()
    found = causal_conv1d_update(x, pool, weight, bias, conv_state_indices=pads, pad_slot_id=99, **how)
    assert torch.equal(found, expected)
    check_pool(pool, before, dense)


@pytest.mark.parametrize("S", [3, 4, 6])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_a_ring_is_the_state_in_another_order(T, S):
    """Three calls from the 5th token on; place p mod S of the ring is token p."""
    weight, state = normal(D, W), normal(N, D, S)
    count = torch.tensor([5, 6, 7, 8])
    ring = torch.stack([s.roll(int(n), -1) for s, n in zip(state, count, strict=True)])
    for seed in range(3):
        x = normal(N, D, T) + seed
        expected = causal_conv1d_update(x, state, weight)
        close(causal_conv1d_update(x, ring, weight, cache_seqlens=count), expected)
        count = count + T
        close(torch.stack([s.roll(-int(n), -1) for s, n in zip(ring, count, strict=True)]), state)


def test_rows_of_the_recurrence():
    x, dt, A = normal(N, H, V), normal(N, H, 1).abs(), -normal(H, 1, 1).abs()
    B, C, D, z, bias = normal(N, G, K), normal(N, G, K) + 1, normal(H, V), normal(N, H, V) - 1, normal(H, 1)
    wide = dt.expand(N, H, V), A.expand(H, V, K)
    more = {"D": D, "z": z, "dt_bias": bias.expand(H, V), "dt_softplus": True}
    pool = pool_of(H, V, K)
    dense, before = begin(pool), pool.clone()
    expected = selective_state_update(dense, x, *wide, B, C, **more)
    assert torch.equal(selective_state_update(pool, x, *wide, B, C, **more, state_batch_indices=ROWS), expected)
    check_pool(pool, before, dense)
    own = begin(before)
    more["dt_bias"] = more["dt_bias"].contiguous()
    assert torch.equal(selective_state_update(own, x, *(y.contiguous() for y in wide), B, C, **more), expected)
    assert torch.equal(own, dense)


@pytest.mark.parametrize("lengths", [None, [5, 0, 1, 2], [8, 0, 0, 0], [0, 3, 4, 1]], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_states_of_flas_convolution(lengths, given):
    """Each sequence alone, the next token from its final state, and all gradients."""
    B, T = (N, 3) if lengths is None else (1, 8)
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    x, weight, bias, residual = normal(B, T, D), normal(D, W), normal(D), normal(B, T, D) + 1
    state = normal(N, D, W) if given else None
    each = list(x) if lengths is None else list(x[0].split(lengths))
    kept = torch.zeros(N, D, W, dtype=x.dtype) if state is None else state
    wholes = [torch.cat([s, y.mT], -1) for s, y in zip(kept, each, strict=True)]
    inputs = [y.requires_grad_() for y in (x, weight, bias) + ((state,) if given else ())]
    y, end = causal_conv1d(x, weight, bias, residual, state, True, "swish", cu_seqlens=offsets)
    each = list(x) if lengths is None else list(x[0].split(lengths))
    starts = [None] * N if state is None else state[..., 1:].split(1)
    alone = [causal_conv1d_fn(y.mT[None], weight, bias, None, start, activation="silu")[0].mT
             for y, start in zip(each, starts, strict=True)]  # fmt: skip
    right = torch.stack(alone) if lengths is None else torch.cat(alone)[None]
    close(y, right + residual)
    close(end, torch.stack([one[..., -W:] for one in wholes]))
    dy = normal(B, T, D)
    for grads in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(right, inputs, dy), strict=True):
        close(*grads)
    assert causal_conv1d(x, weight, bias, None, state, cu_seqlens=offsets)[1] is None


def rows_of_conv(rows):
    return causal_conv1d_update(normal(2, D), normal(7, D, 3), normal(D, W), conv_state_indices=torch.tensor(rows))


@pytest.mark.parametrize(("call", "kind", "text"), [
    (lambda: rows_of_conv([0, 7]),
     ValueError, r"causal_conv1d_update: conv_state_indices is \[0, 7\], expected rows of a pool of 7"),
    (lambda: rows_of_conv([3, 3]),
     ValueError, r"conv_state_indices is \[3, 3\], expected no row twice"),
    (lambda: rows_of_conv([3.0, 1]),
     TypeError, "conv_state_indices has dtype"),
    (lambda: causal_conv1d_update(normal(2, D), normal(2, D, 3), normal(D, W), cache_seqlens=torch.tensor([3])),
     ValueError, r"cache_seqlens has shape \(1,\), expected \(B,\) = \(2,\)"),
    (lambda: selective_state_update(normal(7, H, V, K), normal(2, H, V), normal(2, H, 1).expand(2, H, V),
                                    -normal(H, 1, 1).expand(H, V, K), normal(2, G, K), normal(2, G, K),
                                    state_batch_indices=torch.tensor([0, -2])),
     ValueError, r"selective_state_update: state_batch_indices is \[0, -2\], expected rows of a pool of 7"),
    (lambda: causal_conv1d(normal(2, 5, D), normal(D, W), initial_state=normal(2, D, W - 1)),
     ValueError, r"causal_conv1d: initial_state has shape \(2, 6, 3\), expected \(N, D, W\) = \(2, 6, 4\)"),
])  # fmt: skip
def test_wrong_rows_are_refused(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
