"""The property tests that apply to functions whose weights learn."""

from __future__ import annotations

import pytest

import linattn_np as la
from linattn_np.fast_weights.core import FastWeights
from tests.call import test_calls, test_layouts, test_pullback, test_replay, test_replay_vjp, test_stored_states
from tests.cases import cases_of
from tests.properties import test_bits, test_catalog, test_libraries, test_nan, test_numerics, test_sequences
from tests.properties.of_any import properties

pytest.importorskip("numba")
MODULES = (test_catalog, test_sequences, test_bits, test_nan, test_numerics, test_libraries, test_calls, test_layouts,
           test_pullback, test_replay, test_replay_vjp, test_stored_states)  # fmt: skip
LEARNERS = [fn for fn in la.VARIANTS if isinstance(fn.spec.core, FastWeights)]
CASES = [case for fn in LEARNERS for case in cases_of(fn)]
FEW = [cases_of(fn)[0] for fn in LEARNERS]  # tests that speak of no option
OF_OPTIONS = (
    "test_forward_is_the_loop",
    "test_pullback_by_central_differences",
    "test_an_empty_sequence_hands_its_state_over",
)
OTHER = {  # tests of other states: why a learner has none such
    "test_read_equals_the_output_of_the_last_query": "queries read a model, of arrays that are not in its state",
    "test_nothing_comes_back_across_a_reset": "momenta, and gradients at the weights before it, cross a reset",
}
CAUSAL = "test_no_later_token_changes_an_earlier_output"
OF_ONE = {
    (la.atlas, CAUSAL): "large keys: a deep memory diverges; the same test of bits has smaller ones",
    (la.titans, CAUSAL): "likewise",
    (la.momentum_delta_rule, "test_adjoint_dot_product"): "linear in values, state and momentum together",
    (
        la.lact,
        "test_nan_and_inf_stay_in_their_head_and_sequence",
    ): "a token is read by those after its chunk, not by itself",
    (
        la.lact,
        "test_any_shape_any_form",
    ): "columns of one channel have no other direction: what they learn is their rounding",
}


def cases():
    """(case, test, keywords) of what applies."""
    for case in CASES:
        for p in properties(case, *MODULES):
            name = p.values[0].__name__
            is_other = name in OTHER or ((case.fn, name) in OF_ONE and "bits" not in p.id)
            if not is_other and (case in FEW or name in OF_OPTIONS):
                yield pytest.param(case, *p.values, id=f"{case}-{p.id}")


@pytest.mark.parametrize(("case", "test", "keywords"), list(cases()))
def test_property(case, test, keywords, request):
    if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
        keywords = keywords | {"monkeypatch": request.getfixturevalue("monkeypatch")}
    test(case, **keywords)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_in_every_library(library, case):
    test_libraries.check_both(library, case, library.dtypes[-1], T=5 if library.quick else 1)
