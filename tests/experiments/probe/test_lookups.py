"""Lookups of several hops, and normalisers."""

from linattn_np.experiments.probe import lookups, normalisers


def test_hops_in_one_call():
    found = {row[0]: row[1:] for row in lookups.probe(quick=True).tables[0].rows}
    assert found["softmax_attention, 1 call"][:2] == (1.0, 0.0)
    assert found["softmax_attention, 4 calls"][:3] == (1.0, 1.0, 1.0)
    assert all(y >= 0.99 for y in found["deltaformer, 1 call"] if y == y)
    assert all(y >= 0.99 for y in found["comba, 1 call, orthogonal addresses"] if y == y)
    assert found["comba, 1 call"][0] < 0.9


def test_division_by_what_goes_to_0():
    near, long, _ = normalisers.probe(quick=True).tables
    errors = {row[0]: row[1:] for row in near.rows}
    assert errors["num / den"][-1] > 100 * errors["num / den"][0]
    assert max(errors["none"] + errors["RMSNorm"] + errors["num / den, elu + 1"]) < 100
    assert max({row[0]: row[1:] for row in long.rows}["num / den, elu + 1"]) < 100
