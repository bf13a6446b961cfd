"""States between segments of a rank's tokens, on NumPy twins of the small kernels: indices and layouts, without a GPU.

Offsets and transfers of segments are la.summary's, in the kernels' layout; the twins go from segment to segment as the
kernels' sources do.
"""

from __future__ import annotations

from types import SimpleNamespace

import array_api_compat.numpy as xp
import numpy as np
import pytest

import linattn_np as la
from linattn_np.matrix_state.cuda import neighbours as matrices
from linattn_np.matrix_state.cuda.delta.launch import DeltaBatch
from linattn_np.matrix_state.cuda.scan import neighbours as scalars
from linattn_np.matrix_state.cuda.scan.launch import ScanBatch
from linattn_np.matrix_state.cuda.vector import neighbours as vectors
from linattn_np.matrix_state.cuda.vector.launch import VectorBatch
from linattn_np.testing import relative_error, sample

N, H, GROUP, K, V, WIDE = 2, 3, 2, 6, 5, 128
HEADS, CHUNK, SEGMENTS, EACH = H * GROUP, 64, 3, 2
T = CHUNK * (SEGMENTS * EACH - 1) - 7  # the last segment is shorter
CUTS = [*range(0, T, CHUNK * EACH), T]


class Neighbours:
    """Ranks that have this state and this gradient."""

    def __init__(self, S, dS):
        self._S, self._dS = S, dS

    def state(self, transfer, offset):
        self.transfer, self.offset = transfer, offset
        return self._S

    def gradient(self, dstate):
        self.before = dstate
        return self._dS


def call(fn, given=True):
    """(arrays with a head of q for each of the outputs, outputs' gradient, ranks around)."""
    rng = np.random.default_rng(4)
    arrays = sample(fn, rng, B=(N,), T=T, H=H, K=K, V=V, optional=False)
    arrays["q"] = rng.standard_normal((N, T, HEADS, K))
    arrays |= {n: 0.01 * arrays[n] for n in ("g", "beta") if n in arrays}  # something is left of earlier states
    S, dS = (rng.standard_normal((N, H, K, V)) for _ in range(2))
    return arrays, rng.standard_normal((N, T, HEADS, V)), Neighbours(*((S, dS) if given else (None, None)))


def part(arrays, s):
    return {n: x[:, CUTS[s] : CUTS[s + 1]] for n, x in arrays.items()}


def state_of(x):
    """(N, H, K, V) of each head of the outputs: (slots, V, K)."""
    return np.repeat(x, GROUP, axis=1).swapaxes(-1, -2).reshape(N * HEADS, V, K)


def padded(x):
    wide = np.zeros((*x.shape[:-2], WIDE, WIDE))
    wide[..., : x.shape[-2], : x.shape[-1]] = x
    return wide.reshape(*x.shape[:-2], WIDE * WIDE)


def offsets(fn, arrays):
    """The offsets of segments (slots, segments, V, K), and their transfers."""
    spans = [la.summary(fn, **part(arrays, s)) for s in range(SEGMENTS)]
    return np.stack([state_of(span.offset) for span in spans], 1), [span.transfer for span in spans]


def gradients_of_heads(fn, arrays, dout):
    """The same backward: what each segment adds to the gradient before it, for each head of the outputs."""
    each = []
    for s in range(SEGMENTS):
        own, d = part(arrays, s), dout[:, CUTS[s] : CUTS[s + 1]]
        heads = []
        for n in range(GROUP):
            one = own | {"q": own["q"][:, :, n::GROUP]}
            zero = np.zeros((N, H, K, V))
            heads.append(la.vjp(fn, **one, state=zero)[1](d[:, :, n::GROUP]).state)
        each.append(np.stack(heads, 2).reshape(N, HEADS, K, V).swapaxes(-1, -2).reshape(N * HEADS, V, K))
    return np.stack(each, 1)


def wanted(fn, arrays, dout, ranks):
    """(states before the segments, gradients after them by head 0 of each group, summary, gradient before all)."""
    S = np.zeros((N, H, K, V)) if ranks._S is None else ranks._S
    states = [S]
    for s in range(SEGMENTS - 1):
        states.append(fn(**part(arrays, s), state=states[-1], return_state=True).state)
    ends, d = [], ranks._dS
    for s in reversed(range(SEGMENTS)):
        ends.append(np.zeros_like(S) if d is None else d)
        _, pull = la.vjp(fn, **part(arrays, s), state=np.zeros_like(S), return_state=True)
        d = pull(dout[:, CUTS[s] : CUTS[s + 1]], d).state
    before = la.vjp(fn, **arrays, state=np.zeros_like(S))[1](dout).state
    return states, ends[::-1], la.summary(fn, **arrays), before


def assert_between(fn, arrays, dout, ranks, begins, ends):
    """begins, ends: (slots, segments, V, K) of the segments."""
    states, after, span, before = wanted(fn, arrays, dout, ranks)
    for s in range(SEGMENTS):
        assert relative_error(begins[:, s], state_of(states[s])) < 1e-5
        summed = ends[:, s].reshape(N, H, GROUP, V, K).sum(2).swapaxes(-1, -2)  # groups share a gradient
        assert relative_error(summed, after[s]) < 1e-5 or not np.any(after[s])
    assert relative_error(ranks.offset, span.offset) < 1e-5
    assert relative_error(ranks.before, before) < 1e-5
    assert (ranks.transfer is None) == (span.transfer is None)
    if span.transfer is not None:
        assert relative_error(ranks.transfer, span.transfer) < 1e-5


def plan(ranks):
    return SimpleNamespace(neighbours=ranks, scale=1.0)


def sizes(segments):
    return (N,), T, HEADS, H, K, V, N, None, T, -(-T // CHUNK), N * -(-T // CHUNK), segments, EACH


GIVEN = pytest.mark.parametrize("given", [True, False], ids=["ranks on both sides", "zeros"])


@GIVEN
@pytest.mark.parametrize("fn", [la.simple_gla, la.linear_attention], ids=lambda fn: fn.__name__)
def test_states_between_segments_of_scalar_decays(monkeypatch, fn, given):
    arrays, dout, ranks = call(fn, given)
    added, transfers = offsets(fn, arrays)
    more = gradients_of_heads(fn, arrays, dout)
    logs = np.zeros((N * HEADS, SEGMENTS))
    if fn is la.simple_gla:
        logs = np.stack([np.repeat(x, GROUP, 1).reshape(-1) for x in transfers], 1) / np.log(2)

    def scan(batch, arrays, g, start, end, factors, reverse, every):
        assert every
        for slot in range(N * HEADS):
            for s in range(SEGMENTS):
                at = slot * batch.segments + s
                end.array.reshape(-1, V, K)[at] = (more if reverse else added)[slot, s]
                end.sums[at] = logs[slot, s]

    def sum_segments(batch, states, start, reverse):
        used = -(-(batch.T // CHUNK) // batch.chunks)
        assert used == batch.segments
        p, sums = states.array.reshape(-1, batch.segments, V, K), states.sums.reshape(-1, batch.segments)
        for slot in range(N * HEADS):
            S = np.zeros((V, K))
            if start.array is not None:
                S = start.array.reshape(-1, K, V)[slot // start.group].T
            for n in range(used):
                s = used - 1 - n if reverse else n
                next_one = S * 2 ** sums[slot, s] + p[slot, s] if n < used - 1 else S
                p[slot, s], S = S, next_one

    monkeypatch.setattr(scalars, "scan", scan)
    monkeypatch.setattr(scalars, "sum_segments", sum_segments)
    batch = ScanBatch((N,), T, HEADS, H, K, V, N, None, T, "bfloat16", True, 16, SEGMENTS + 1, EACH, True)
    g = None if fn is la.linear_attention else arrays["g"]
    states, S = scalars.entered(xp, plan(ranks), batch, None, None, g)
    ends = scalars.left(xp, plan(ranks), batch, None, None, g)
    assert (S is None) == (not given)
    assert states.group == ends.group == 0
    begins = states.array.reshape(-1, SEGMENTS + 1, V, K)
    after = np.zeros_like(begins)
    after.reshape(-1, V, K)[:-1] = ends.array
    assert_between(fn, arrays, dout, ranks, begins, after)


@GIVEN
def test_states_between_segments_of_vector_decays(monkeypatch, given):
    fn = la.gla
    arrays, dout, ranks = call(fn, given)
    added, transfers = offsets(fn, arrays)
    more = gradients_of_heads(fn, arrays, dout)
    factors = np.zeros((N * HEADS, SEGMENTS, WIDE))
    factors[..., :K] = np.stack([np.repeat(np.exp(x), GROUP, 1).reshape(-1, K) for x in transfers], 1)

    def launch_one(name, batch, grid, arrays, *, every, added: np.ndarray, decays):
        assert (name, every) == ("adds", True)
        added[...] = padded(own).reshape(added.shape)
        decays[...] = factors.reshape(decays.shape)

    def sum_segments(batch, arrays, *, start, reverse, added, decays, begins):
        assert "fields" not in arrays
        assert batch.segments == SEGMENTS + 1
        last = max(-(-batch.T // CHUNK) - 1, 0) // batch.chunks
        x, d = added.reshape(-1, SEGMENTS, WIDE, WIDE), decays.reshape(-1, SEGMENTS, 1, WIDE)
        to = begins.reshape(-1, SEGMENTS + 1, WIDE, WIDE)
        S = np.zeros((N * HEADS, WIDE, WIDE))
        if start.array is not None:
            S[:, :V, :K] = np.repeat(start.array.reshape(-1, K, V), start.group, 0).swapaxes(-1, -2)
        for i in range(last):
            n = last - 1 - i if reverse else i
            S = S * d[:, n] + x[:, n]
            to[:, n + (not reverse)] = S

    monkeypatch.setattr(vectors, "launch_one", launch_one)
    monkeypatch.setattr(vectors, "sum_segments", sum_segments)
    batch, own = VectorBatch(*sizes(SEGMENTS + 1), None), added
    begins, S = vectors.entered(xp, plan(ranks), batch, {"fields": {}})
    x, d = vectors.empty(xp, batch)
    x[...], d[...] = padded(more).reshape(x.shape), factors.reshape(d.shape)
    ends, dend = vectors.left(xp, plan(ranks), batch, {"fields": {}}, x, d)
    assert (S is None) == (dend is None) == (not given)
    begins[:, 0] = 0 if S is None else padded(state_of(S))  # kernels read the initial state itself
    ends = whole(ends, SEGMENTS + 1)
    ends[:, SEGMENTS - 1] = 0 if dend is None else padded(dend.swapaxes(-1, -2).reshape(-1, V, K))
    assert_between(fn, arrays, dout, ranks, narrow(begins), narrow(ends))


def whole(states, segments):
    """States of all slots, from those that begin with the second one."""
    full = np.zeros((N * HEADS * segments, WIDE * WIDE), np.float32)
    full[:-1] = states.reshape(-1, WIDE * WIDE)
    return full.reshape(-1, segments, WIDE * WIDE)


def narrow(states):
    return states.reshape(*states.shape[:2], WIDE, WIDE)[:, :, :V, :K]


@GIVEN
@pytest.mark.parametrize("fn", [la.gated_delta_rule, la.kda], ids=lambda fn: fn.__name__)
def test_states_between_segments_of_transfer_matrices(monkeypatch, fn, given):
    arrays, dout, ranks = call(fn, given)
    added, transfers = offsets(fn, arrays)
    more = gradients_of_heads(fn, arrays, dout)
    M = np.full((N * HEADS, SEGMENTS + 1, WIDE, WIDE), np.nan)
    rows = np.stack([np.repeat(x, GROUP, 1).swapaxes(-1, -2).reshape(-1, K, K) for x in transfers], 1)
    M[:, 1:] = padded(rows).reshape(-1, SEGMENTS, WIDE, WIDE)

    def multiply(batch, reverse, *, added, transfers, begins):
        last = max(-(-batch.T // CHUNK) - 1, 0) // batch.chunks
        assert (last, batch.segments, batch.offsets) == (SEGMENTS + 1, SEGMENTS + 2, None)
        x, to = added.reshape(-1, SEGMENTS + 1, WIDE, WIDE), begins.reshape(-1, SEGMENTS + 2, WIDE, WIDE)
        S = np.zeros((N * HEADS, WIDE, WIDE))
        for n in range(last):
            s = last - n if reverse else n
            if n:
                S = S @ (M[:, s].swapaxes(-1, -2) if reverse else M[:, s])
            S = S + x[:, s - reverse]
            to[:, s + (-1 if reverse else 1)] = S

    monkeypatch.setattr(matrices, "multiply_transfers", multiply)
    batch = DeltaBatch(*sizes(SEGMENTS + 2), True, False, 0.0, 1)
    empty = matrices.empty_offsets(xp, batch)
    forward, backward = empty, np.full_like(empty, np.nan)
    forward[...] = np.nan
    forward[:, 1:], backward[:, :SEGMENTS] = padded(added), padded(more)
    begins, S = matrices.entered(xp, plan(ranks), batch, forward, M)
    ends, dend = matrices.left(xp, plan(ranks), batch, backward, M)
    assert (S is None) == (dend is None) == (not given)
    assert_between(fn, arrays, dout, ranks, *(narrow(whole(y, SEGMENTS + 2)) for y in (begins, ends)))
