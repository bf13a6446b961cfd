"""`linattn probe`: what it prints follows from what it measures, and what it measures is the theory's."""

import argparse
import json

import numpy as np
import pytest

from linattn_np.lab import probe_growth, probe_kernels, probe_tracking, probe_writing
from linattn_np.lab.found import Found, Table, markdown
from linattn_np.lab.probe_command import PROBES, add_arguments, run


def command(*given: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(x) for x in given]))


@pytest.mark.parametrize("name", PROBES)
def test_a_quick_run_prints_and_writes(name, tmp_path, capsys):
    figures, page = tmp_path / "deep" / "p.json", tmp_path / "p.md"
    assert command(name, "--quick", "--json", figures, "--markdown", page, "--pictures", tmp_path) == 0
    printed = capsys.readouterr().out
    written = json.loads(figures.read_text())["probes"][name]
    assert all(sentence in printed for sentence in written["sentences"])
    assert page.read_text().strip() in printed
    assert all(len(row) == len(t["columns"]) for t in written["tables"] for row in t["rows"])
    assert (tmp_path / f"probe-{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_four_steps_follow_any_permutation_of_five_and_fewer_do_not():
    swaps, history = probe_tracking.words(np.random.default_rng(1), 500)
    said, S = probe_tracking.track(swaps, np.float64, exact=True)
    np.testing.assert_array_equal(said, history[:, 0])
    np.testing.assert_array_equal(S, np.eye(5)[history[-1]])
    assert np.mean(probe_tracking.track(swaps[:, :2], np.float64, exact=True)[0] == history[:, 0]) < 0.5


@pytest.mark.parametrize(("beta", "share"), [(2.0, 1.0), (1.5, 1.0), (1.0, 0.0)])
def test_parity_needs_a_strength_above_one(beta, share):
    bits = np.random.default_rng(2).integers(0, 2, 60)
    bits[0] = 1
    assert probe_tracking.parity(beta, bits, np.float64)[0] == share


def test_the_verdict_on_parity_follows_its_figures():
    right = {(m, d, e): 0.5 for m in (1, 2, 4) for d in (np.float64, np.float32) for e in (True, False)}
    signs = {(b, np.float64, n): (float(b > 1), b) for b in (1.0, 2.0) for n in (100, 700)}
    told = probe_tracking._sentences(right, signs, (1.0, 2.0), 700, False, 0.0)
    assert "50 % of 700" in told[0]
    assert told[1] == "Two steps did not make a cycle of three."
    assert "beta in {2} and of 700 bits in float64 for {2}" in told[2]


def test_rebinding_by_hand():
    shares = {row[0]: row[1:] for row in probe_writing.rebinding().tables[0].rows}
    for name, expected in {
        "linear_attention": (1, 1), "delta_rule, beta 1": (0, 1), "delta_rule, beta 0.5": (0.25, 0.5),
        "mesa_net, ridge 1e-9": (0.5, 0.5), "mesa_net, ridge 1e-9, decay 0.8": (0.8 / 1.8, 1 / 1.8),
    }.items():  # fmt: skip
        np.testing.assert_allclose(shares[name], expected, atol=1e-8)


def test_least_squares_meets_its_theory():
    rows = {row[0]: row[1:] for row in probe_writing.least_squares(quick=True).tables[0].rows}
    assert abs(rows["delta_rule, beta 1"][-2] / 32 - 1) < 0.15
    assert abs(rows["mesa_net"][-2] / rows["mesa_net"][-1] - 1) < 0.15
    assert rows["mesa_net"][-2] < rows["delta_rule, beta 0.1"][-2]


def test_growth_is_told_from_its_figures():
    found = probe_growth.probe(quick=True)
    power = {row[0]: row[-1] for row in found.tables[0].rows}
    assert abs(power["linear_attention"] - 0.5) < 0.1
    assert "grows with T for linear_attention (" in found.sentences[0]
    same = {row[0]: row[-1] for row in found.tables[1].rows}
    assert abs(same["linear_attention"] - 1) < 1e-9


def test_more_features_come_nearer():
    found = probe_kernels.kernels(quick=True)
    small = {row[0]: row[1:] for row in found.tables[0].rows}
    assert small["Taylor"][-1] < 0.05 * small["Taylor"][0]
    assert small["FAVOR+"][-1] < 0.5 * small["FAVOR+"][0]


def test_a_figure_that_is_not_there_is_a_dash():
    found = Found("x", "?", [Table("t", ("a", "b"), [(float("nan"), 12345.0)])], [])
    assert "| - | 1.2e+04 |" in markdown(found)
