"""The property tests that apply to functions whose state grows."""

from __future__ import annotations

import pytest

from tests.call import test_calls, test_layouts, test_pullback, test_replay, test_replay_vjp
from tests.cases import GROWING, cases_of
from tests.properties import test_bits, test_catalog, test_influence, test_nan, test_numerics, test_sequences
from tests.properties.of_any import properties

pytest.importorskip("numba")
MODULES = (test_catalog, test_sequences, test_bits, test_nan, test_numerics, test_calls, test_influence, test_layouts,
           test_pullback, test_replay, test_replay_vjp)  # fmt: skip
CASES = [case for fn in GROWING for case in cases_of(fn)]
FEW = [cases_of(fn)[0] for fn in GROWING]  # tests that speak of no option
OF_OPTIONS = ("test_forward_is_the_loop", "test_pullback_by_central_differences", "test_queries_of_their_own_length")
FIXED_STATE = {  # tests of states of one size: why a cache is no such state; tests/softmax/test_cache.py has its own
    "test_no_state_is_a_state_of_zeros": "zeros are keys and values of 0",
    "test_adjoint_dot_product": "linear in the values alone",
    "test_packed_sequences_are_one_by_one_to_the_bit": "sequences of a batch have the slots of the longest",
    "test_packed_sequences_without_a_batch_axis_and_with_two": "likewise",
    "test_an_empty_sequence_hands_its_state_over": "likewise",
    "test_alone_in_a_batch_and_packed_are_the_same_bits": "likewise",
    "test_nan_and_inf_stay_in_their_head_and_sequence": "a state of one matrix",
    "test_overwritten_state": "a cache that is overwritten keeps its slots",
    "test_overwritten_state_of_a_ragged_batch_and_of_a_view": "likewise",
    "test_nothing_comes_back_across_a_reset": "tokens before a reset are in the cache",
    "test_scale": "the scale is no factor of the output",
    "test_a_reset_has_no_gradient": "the cache has the log decay of its tokens, whose gradient is that of a gate",
    "test_float64_against_the_loop": "which is -inf behind a reset",
    "test_float32_against_float64_on_the_same_numbers": "likewise",
    "test_any_gates": "likewise",
    "test_one_sum_where_a_key_also_erases": "of the matrix-state core",
}


def cases():
    """(case, test, keywords) of what applies."""
    for case in CASES:
        for p in properties(case, *MODULES):
            name = p.values[0].__name__
            if name not in FIXED_STATE and (case in FEW or name in OF_OPTIONS):
                yield pytest.param(case, *p.values, id=f"{case}-{p.id}")


@pytest.mark.parametrize(("case", "test", "keywords"), list(cases()))
def test_property(case, test, keywords, request):
    if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        keywords = keywords | {"monkeypatch": request.getfixturevalue("monkeypatch")}
    test(case, **keywords)
