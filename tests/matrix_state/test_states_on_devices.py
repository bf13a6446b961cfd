"""States at positions on CuPy arrays: which calls a pass covers, its builds without a GPU, and its results on one."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import linattn_np as la
from linattn_np.call import pieces, pieces_vjp
from linattn_np.matrix_state.cuda import operands
from linattn_np.matrix_state.cuda.delta import plan as cuda_delta_plan
from linattn_np.matrix_state.cuda.scan import wgmma
from linattn_np.matrix_state.cuda.vector import plan as cuda_vector_plan
from linattn_np.matrix_state.types import Plan
from linattn_np.runtime.cuda import nvrtc, sources
from linattn_np.runtime.cuda.compile import compile_source
from linattn_np.runtime.shapes import sequences
from linattn_np.testing import relative_error
from tests.cases import PLAIN, draw, with_arrays

SCALAR, VECTOR = (with_arrays("q k v g", decay=kind) for kind in ("SCALAR", "VECTOR"))
DELTA, VECTOR_DELTA = (with_arrays("q k v g beta", decay=kind) for kind in ("SCALAR", "VECTOR"))


def plan_of(T, positions, offsets=None):
    return Plan(np, np.float32, 1.0, sequences=tuple(sequences(T, offsets)), states_at=positions)


@pytest.mark.parametrize(("positions", "given"), [
    ((64, 192), True), ((64, 300), True), ((300,), True), (None, True), ((1, 64), False), ((64, 299), False),
])  # fmt: skip
def test_positions_at_the_ends_of_chunks(positions, given):
    assert operands.gives_states(plan_of(300, positions)) is given
    assert operands.gives_states(plan_of(300, positions, [0, 64, 300])) is given


def test_positions_at_the_ends_of_chunks_of_packed_sequences():
    assert operands.gives_states(plan_of(300, (0, 100, 164, 300), [0, 100, 300]))
    assert not operands.gives_states(plan_of(300, (128,), [0, 100, 300]))


OFFSETS = [0, 100, 100, 400, 600]
PACKED = {"T": 600, "B": (1,), "N": 4}
VECTORS = cuda_vector_plan.VectorKind(128, 128, "bfloat16")
BUILDS = {
    "dots": (wgmma.SCAN, lambda at: wgmma.scan_pass(128, 128, True, dots=True, at=at).constants),
    "scan": (wgmma.SCAN, lambda at: wgmma.scan_pass(128, 128, True, at=at).constants),
    "writes": (wgmma.WRITES, lambda at: wgmma.writes_pass(128, 128, True, True, at).constants),
    "chain": (cuda_delta_plan.CHAIN, lambda at: cuda_delta_plan.constants("chain", 128, 128, True, at=at)),
    "reverse": (cuda_delta_plan.REVERSE, lambda at: cuda_delta_plan.constants("reverse", 128, 128, True, at=at)),
    "vector reverse": (cuda_vector_plan.REVERSE.file,
                       lambda at: cuda_vector_plan.reverse_constants(VECTORS, at=at)),
    "vector reverse, delta": (cuda_vector_plan.REVERSE.file,
                              lambda at: cuda_vector_plan.reverse_constants(VECTORS, True, at=at)),
}  # fmt: skip


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(("name", "at"), [*((name, 1) for name in BUILDS), ("reverse", 2)])
def test_builds_with_positions_spill_no_more_than_addresses(name, at):
    """Of a ragged batch, or of dots with gradients of states, two."""
    file, constants = BUILDS[name]
    plain, with_positions = dict(constants(0)), dict(constants(at))
    assert with_positions == plain | {"LA_AT": at}
    log = compile_source(sources.read(file), with_positions, "sm_90a", cached=False)[1]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled
    assert max(spilled) <= {"scan": 8, "dots": 16}.get(name, 16 * (at - 1))


def test_vector_builds_have_the_constant_where_they_store():
    for name in ("scan", "chain"):
        plain, stores = (dict(cuda_vector_plan.constants(name, VECTORS, cuda_vector_plan.Build(at=at)))
                         for at in (0, 1))  # fmt: skip
        assert stores == plain | {"LA_AT": 1}


# on a GPU


def rounded(case, **sizes):
    """(arrays as a CUDA call takes them, the same numbers in float64, the states likewise)."""
    arrays, state = draw(case, K=128, V=128, **sizes)
    arrays.pop("gv", None)  # with a decay of both axes calls go token by token
    given = {n: x.astype(np.float32 if n in ("g", "beta", "u") else ml_dtypes.bfloat16) for n, x in arrays.items()}
    if case.spec.decay.name == "VECTOR":
        given["g"] = given["g"].astype(ml_dtypes.bfloat16)
    return given, {n: x.astype(np.float64) for n, x in given.items()}, state.astype(np.float32)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("fn", "positions", "sizes"), [
    (SCALAR, [0, 256, 512, 700], {"T": 700}), (SCALAR, [256, 512], {"T": 700, "Hq": 4}),
    (DELTA, [0, 64, 448, 1024], {"T": 1024}), (DELTA, [64, 300], {"T": 300, "Hq": 4}),
    (DELTA, [64, 2048], {"T": 4096, "B": (1,), "H": 1}), (DELTA, [100, 256], {"T": 256}),
    (VECTOR, [64, 300], {"T": 300}), (VECTOR, [128], {"T": 300, "Hq": 4}), (VECTOR_DELTA, [64, 192], {"T": 300}),
    (SCALAR, [64, 192, 256, 448, 700], {"T": 700}), (SCALAR, [64, 128], {"T": 200, "Hq": 4}),
    (SCALAR, [64, 100, 228, 356, 400, 600], PACKED), (DELTA, [64, 100, 228, 356, 400, 600], PACKED),
    (VECTOR, [64, 100, 228, 356, 400, 600], PACKED), (VECTOR_DELTA, [64, 100, 228, 356, 400, 600], PACKED),
    (VECTOR, [0, 164], PACKED), (SCALAR, [50, 500], PACKED),
])  # fmt: skip
def test_states_and_their_gradients(cp, monkeypatch, fn, positions, sizes):
    """Against float64; outputs and final state of the pass have the bits of a call without positions."""
    case = next(c for c in PLAIN if c.fn is fn)
    inside = (100 in positions and sizes is not PACKED) or 50 in positions
    if not inside:  # one pass, with gradients too
        monkeypatch.setattr(pieces, "compute", None)
        monkeypatch.setattr(pieces_vjp, "compute", None)
    offsets = OFFSETS if sizes is PACKED else None
    given, wide, state = rounded(case, **sizes)
    there, begun = {n: cp.asarray(x) for n, x in given.items()}, cp.asarray(state)
    options = {"return_state": True, "return_states_at": positions, "cu_seqlens": offsets}
    exact, back = la.vjp(case.fn, **wide, state=state.astype(np.float64), backend="chunks", **options)
    plain = case.fn(**there, state=begun, return_state=True, cu_seqlens=offsets)
    for _ in range(3):  # recorded, replayed
        found = case.fn(**there, state=begun, **options)
        assert relative_error(cp.asnumpy(found.states), exact.states) < 2e-2
        if not inside:
            assert cp.array_equal(found.out.view(cp.uint16), plain.out.view(cp.uint16))
            assert cp.array_equal(found.state, plain.state)
        rng = np.random.default_rng(1)
        cotangent = [rng.standard_normal(x.shape) for x in exact]
        expected = back(*cotangent)
        _, pullback = la.vjp(case.fn, **there, state=begun, **options)
        dout, *more = cotangent
        grads = pullback(cp.asarray(dout.astype(ml_dtypes.bfloat16)), *(cp.asarray(x, cp.float32) for x in more))
        for n in (*there, "state"):
            assert relative_error(cp.asnumpy(getattr(grads, n)).astype(np.float64), getattr(expected, n)) < 5e-2, n
