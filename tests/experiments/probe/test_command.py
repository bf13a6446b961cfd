"""The command `linattn probe`: its output and files."""

import argparse
import json
import sys

import pytest

from linattn_np.experiments.probe.command import PROBES, add_arguments, run


def command(*given: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(x) for x in given]))


@pytest.mark.parametrize("name", PROBES)
def test_a_quick_run_prints_and_writes(name, tmp_path, capsys):
    figures, page = tmp_path / "deep" / "p.json", tmp_path / "p.md"
    where = ("--json", figures, "--markdown", page, "--pictures", tmp_path / "drawn")
    assert command(name, "--quick", "--full", *where) == 0
    captured = capsys.readouterr()
    printed = captured.out
    written = json.loads(figures.read_text())["probes"][name]
    assert printed.startswith(f"{name} (nothing learned: ")
    assert [line.strip() for line in printed.splitlines()[1:4]] == written["summary"]
    assert all(line.endswith((".", "?")) for line in written["summary"])
    assert all(sentence in printed and sentence in page.read_text() for sentence in written["sentences"])
    assert printed.index("Means: ") < min(printed.index(t["title"][:40]) for t in written["tables"])
    assert all(len(row) == len(t["columns"]) for t in written["tables"] for row in t["rows"])
    assert [captured.err.splitlines()[0], captured.err.count("\n")] == ["probe: 1 runs", 2]
    assert (tmp_path / "drawn" / f"probe-{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_tables_are_behind_full_and_pictures_have_a_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("rebinding", "--quick") == 0
    printed = capsys.readouterr().out
    assert "read with the key" not in printed
    assert "the latest value alone is read from delta_rule (beta 1), gated_delta_rule (decay 0.8);" in printed
    assert "pictures: probe-output/ (probe-rebinding.png)" in printed
    assert (tmp_path / "probe-output" / "probe-rebinding.png").is_file()


def test_missing_packages_are_named_before_any_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(PROBES, "rebinding", None)
    assert command("rebinding", "--pictures", tmp_path / "new") == 2
    printed = capsys.readouterr()
    assert printed.err == "linattn probe: matplotlib not installed: pip install 'linattn_np[lab]', or --no-pictures\n"
    assert printed.out == ""
    assert not (tmp_path / "new").exists()
