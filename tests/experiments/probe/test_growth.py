"""Growth of the state."""

from linattn_np.experiments.probe import growth


def test_growth_rates_of_the_state():
    result = growth.probe(quick=True)
    power = {row[0]: row[-1] for row in result.tables[0].rows}
    assert abs(power["linear_attention"] - 0.5) < 0.1
    assert "grows with T for linear_attention (" in result.sentences[0]
    same = {row[0]: row[-1] for row in result.tables[1].rows}
    assert abs(same["linear_attention"] - 1) < 1e-9
