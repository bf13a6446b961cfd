"""The command line, end to end, at tiny sizes."""

import argparse
import json
import subprocess
import sys
import textwrap

import pytest

from linattn_np.experiments.recall.command import add_arguments, run

TINY = ("--lengths", "256", "--seeds", "1", "--depths", "3", "--memories", "delta,gated_delta,softmax", "--jobs", "1")


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_a_tiny_run_writes_tables_figures_and_pictures(tmp_path, capsys):
    figures, tables, pictures = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "pictures"
    where = ("--json", figures, "--markdown", tables, "--pictures", pictures)
    assert command(*TINY, "--gates", "prose,facts", "--levels", "1,3", *where) == 0
    printed = capsys.readouterr()
    assert "Level 1" in printed.out
    assert "not a replication" in printed.out
    assert "recall" in printed.err
    written = json.loads(figures.read_text())
    assert len(written["scores"]) == 2 * (2 * 2 + 1)
    assert {claim["gates"] for claim in written["verdict"]} == {"prose", "facts"}
    assert "| softmax" in tables.read_text()
    drawn = sorted(path.name for path in pictures.iterdir())
    assert drawn[:2] == ["recall-gates.png", "recall-heat-facts.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures.iterdir())


def test_processes_are_spawned_and_give_the_same_figures(tmp_path):
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    assert command(*TINY, "--levels", "2", "--json", one) == 0
    assert command(*TINY, "--levels", "2", "--json", two, "--jobs", 2) == 0
    first, second = (json.loads(path.read_text()) for path in (one, two))
    assert first["run"]["processes"] != second["run"]["processes"]
    assert all(first[part] == second[part] for part in ("scores", "gates", "verdict"))


def test_a_learned_file_can_be_tested_and_a_text_read(tmp_path, capsys):
    gates, text = tmp_path / "mine.json", tmp_path / "text.txt"
    assert command(*TINY, "--train", "facts", "--out", gates, "--steps", "1") == 0
    text.write_text("Some words of my own. " * 30)
    assert command(*TINY, "--gates", gates, "--text", text, "--levels", "2") == 0
    assert "gated_delta" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--memories", "delta,elephant"), "elephant"),
        (("--lengths", "64"), "too short"),
        (("--train", "prose"), "go together"),
        (("--gates", "nothing.json"), "no gate set"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
    ],
)
def test_bad_options_give_a_one_line_error(words, problem, capsys):
    assert command(*TINY, *words) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--jobs", "2")], ids=["one process", "two processes"])
@pytest.mark.parametrize("names", [("tqdm",), ("rich",), ("threadpoolctl",), ("matplotlib",), ("tqdm", "matplotlib")],
                         ids=" ".join)
def test_a_missing_extra_is_reported_before_any_work(names, words, tmp_path):
    command = ["recall", *TINY, *words, "--levels", "1", "--json", str(tmp_path / "new" / "r.json")]
    command += ["--pictures", str(tmp_path)]
    code = f"""
        import sys
        sys.modules.update(dict.fromkeys({names!r}))  # None: importing it raises ModuleNotFoundError
        from linattn_np.__main__ import main
        import linattn_np.experiments.recall.command as command
        command.measure = None
        sys.exit(main({command!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"linattn recall: {', '.join(names)} not installed: pip install 'linattn_np[lab]'\n"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_pictures_alone_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(*TINY, "--levels", "1") == 0
    capsys.readouterr()


def test_importing_the_package_does_not_import_the_lab():
    code = "import sys, linattn_np; assert not [m for m in sys.modules if m.startswith('linattn_np.experiments')]"
    subprocess.run([sys.executable, "-c", code], check=True)
