"""The command `linattn probe`: what it prints and writes."""

import argparse
import json

import pytest

from linattn_np.experiments.probe.command import PROBES, add_arguments, run


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
