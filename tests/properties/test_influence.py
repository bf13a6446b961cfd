"""The influence matrix of a variant is the call, whatever the values are."""

from __future__ import annotations

import numpy as np
import pytest

import linattn_np as la
from linattn_np.testing import relative_error
from tests.call.test_calls import transposed
from tests.cases import CASES, PLAIN, draw, worst

every_case = pytest.mark.parametrize("case", [c for c in CASES if c.is_linear], ids=str)


@every_case
def test_influence_matrix_is_the_call(case):
    arrays, _ = draw(case, T=9, H=2, Tq=None)
    if not case.causal:
        return check_influence_of_other_queries(case)
    v = arrays[case.spec.change.value]
    A = la.influence_matrix(case.fn, **arrays, **case.options)
    if case.spec.micro_steps == "n":  # values of the steps
        return check_influence_of_micro_steps(case, arrays, A)
    head = "h" if case.spec.row_axes == 2 else ""
    channel = "e" if case.by_channel else ""  # one matrix a value channel
    assert A.shape == (2, *(2,) * len(head), *(3,) * len(channel), 9, 9)
    made = np.einsum(f"b{head}{channel}ij,bj{head}e->bi{head}e", A, v)
    assert relative_error(made, case.fn(**arrays, **case.options)) <= 1e-12
    future = np.triu(np.ones((9, 9)), k=1) > 0
    assert not A[..., future].any()


def check_influence_of_micro_steps(case, arrays, A):
    assert A.shape == (2, 2, 9, 9 * 2)
    made = np.einsum("bhijn,bjnhe->bihe", A.reshape(2, 2, 9, 9, 2), arrays[case.spec.change.value])
    assert relative_error(made, case.fn(**arrays, **case.options)) <= 1e-12
    assert not A[..., np.repeat(np.triu(np.ones((9, 9)), k=1) > 0, 2, axis=1)].any()


def check_influence_of_other_queries(case):
    arrays, _ = draw(case, T=9, Tq=5)
    A = la.influence_matrix(case.fn, **arrays, **case.options)
    assert A.shape == (2, 2, 5, 9)
    made = np.einsum("bhij,bjhe->bihe", A, arrays["v"])
    assert relative_error(made, case.fn(**arrays, **case.options)) <= 1e-12


@pytest.mark.parametrize(
    "case", [c for c in PLAIN if c.is_linear and c.spec.shares_states and not c.spec.micro_steps], ids=str
)
def test_influence_matrix_of_grouped_heads_and_packed_sequences(case):
    arrays, _ = draw(case, T=9, B=(1,), H=2, Hq=4)
    offsets = [0, 2, 2, 9]
    A = la.influence_matrix(case.fn, **arrays, **case.options, cu_seqlens=offsets)
    v, head = arrays[case.spec.change.value], "h" if case.spec.row_axes == 2 else ""
    v = v[:, :, [0, 0, 1, 1]] if head else v
    made = np.einsum(f"b{head}{'e' if case.by_channel else ''}ij,bj{head}e->bi{head}e", A, v)
    assert relative_error(made, case.fn(**arrays, **case.options, cu_seqlens=offsets)) <= 1e-12
    assert not A[..., 2:, :2].any()


def test_influence_heads_first():
    arrays, _ = draw(next(c for c in PLAIN if c.fn is la.kda), T=9, H=3)
    case = next(c for c in PLAIN if c.fn is la.kda)
    A = la.influence_matrix(la.kda, **arrays)
    np.testing.assert_array_equal(la.influence_matrix(la.kda, **transposed(case, arrays), layout="heads_first"), A)


@every_case
def test_influence_matrix_does_not_depend_on_the_values(case):
    arrays, _ = draw(case, T=6)
    moved = arrays | {case.spec.change.value: 3 * arrays[case.spec.change.value] + 1}
    error, _ = worst(
        {"A": la.influence_matrix(case.fn, **moved, **case.options)},
        {"A": la.influence_matrix(case.fn, **arrays, **case.options)},
    )
    assert error == 0
