"""Tables, progress and missing packages."""

from __future__ import annotations

import sys

import pytest

from linattn_np.__main__ import main
from linattn_np.experiments.extras import require
from linattn_np.experiments.progress import progress
from linattn_np.experiments.tables import TextTable, markdown_table, write_table, write_text


class Terminal:
    """Standard error of a terminal."""

    def __init__(self):
        self.written = ""

    def isatty(self):
        return True

    def write(self, text):
        self.written += text

    def flush(self):
        pass


ROWS = (("a", "b", "1.5"), ("a", "c", "22.5"), ("b", "c", "3"))
TABLE = TextTable("two", ("name", "other", "x"), ROWS, sections=True)


def test_a_table_in_markdown():
    assert markdown_table(TABLE).splitlines() == [
        "**two**", "",
        "| name | other |    x |",
        "|------|-------|------|",
        "| a    | b     |  1.5 |",
        "| a    | c     | 22.5 |",
        "| b    | c     |    3 |",
    ]  # fmt: skip


def test_a_table_in_a_pipe(capsys):
    write_table(TABLE)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "two"
    assert next(line for line in lines if "22.5" in line).split() == ["a", "c", "22.5"]


def test_text_is_broken_on_a_terminal_alone(monkeypatch, capsys):
    text = "least-squares " * 20 + "end"
    write_text(text, "  ")
    assert capsys.readouterr().out == f"  {text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_text(text, "  ")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    assert not any(line.endswith("-") for line in lines)
    assert [lines[0][:3], lines[1][:5]] == ["  l", "    l"]


def test_progress_without_a_terminal_is_two_lines(capsys):
    with progress("compare", 123456, "tokens") as done:
        for _ in range(50):
            done(1000)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "compare: 123,456 tokens"
    assert last.startswith("compare: done after ")


def test_progress_on_a_terminal_is_a_bar_with_units(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("probe", 4, "runs") as done:
        done(3)
        done(1)
    assert "probe: 100%" in terminal.written
    assert "4/4" in terminal.written
    assert "runs/s" in terminal.written


def test_what_is_missing_is_named_with_the_command(monkeypatch):
    require("rich", "matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as problem:
        require("rich", "matplotlib", without_pictures="--no-pictures")
    assert str(problem.value) == "matplotlib not installed: pip install 'linattn_np[lab]', or --no-pictures"
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError) as problem:
        require("tqdm", "rich", "matplotlib", without_pictures="--no-pictures")
    assert str(problem.value) == "tqdm, matplotlib not installed: pip install 'linattn_np[lab]'"


@pytest.mark.parametrize("name", ["compare", "bench"])
def test_commands_name_what_is_missing_before_any_work(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main([name, "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"linattn {name}: tqdm, rich not installed: pip install 'linattn_np[lab]'\n"
    assert not (tmp_path / "new").exists()
