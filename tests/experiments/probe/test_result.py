"""Tables as text."""

from linattn_np.experiments.probe.result import ProbeResult, Table, markdown


def test_a_missing_figure_is_a_dash():
    found = ProbeResult("x", "?", [Table("t", ("a", "b"), [(float("nan"), 12345.0)])], [])
    assert "| - | 1.2e+04 |" in markdown(found)
