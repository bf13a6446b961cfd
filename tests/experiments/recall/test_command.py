"""The command line, end to end, at tiny sizes."""

import argparse
import json
import subprocess
import sys
import textwrap

import pytest

from linattn_np.experiments.recall.command import add_arguments, run

TINY = ("--lengths", "256", "--seeds", "1", "--depths", "3", "--memories", "delta,gated_delta,softmax", "--jobs", "1")
NO_PICTURES = "--no-pictures"


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_a_tiny_run_writes_tables_figures_and_pictures(tmp_path, capsys):
    figures, tables, pictures = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "pictures"
    where = ("--json", figures, "--markdown", tables, "--pictures", pictures)
    assert command(*TINY, "--gates", "prose,facts", "--levels", "1,3", *where) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Asked: each memory read texts of up to 256 tokens")
    assert "\nH1: a decay makes a memory lose facts\n" in printed.out
    assert "Level 1" not in printed.out  # the tables are behind --full
    assert f"pictures: {pictures}/ (8 files, " in printed.out
    first, last = printed.err.splitlines()
    assert first == f"recall: {256 * (3 + 1) * (2 * 2 + 1) * 2:,} tokens"
    assert last.startswith("recall: done after ")
    written = json.loads(figures.read_text())
    assert len(written["scores"]) == 2 * (2 * 2 + 1)
    assert {claim["gates"] for claim in written["verdict"]} == {"prose", "facts"}
    assert "| Softmax attention" in tables.read_text()
    drawn = sorted(path.name for path in pictures.iterdir())
    assert drawn[:2] == ["recall-gates.png", "recall-heat-facts.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures.iterdir())
    again = tmp_path / "again.json"
    assert command("--read", figures, "--full", "--json", again, NO_PICTURES) == 0
    full = capsys.readouterr().out
    assert full.index("Asked: ") < full.index("Level 1 (repeated sentences")
    assert "not a replication" in full
    assert again.read_text() == figures.read_text()


def test_a_summary_has_the_figures_of_the_tables(tmp_path):
    results, figures = tmp_path / "r.json", tmp_path / "s.json"
    where = ("--json", results, "--summary", figures, NO_PICTURES)
    assert command(*TINY, "--gates", "prose,facts", "--levels", "1,3", *where) == 0
    scores, written = json.loads(results.read_text())["scores"], json.loads(figures.read_text())
    rows = {(row["gates"], row["memory"]): row for row in written["memories"]}
    assert len(rows) == 2 * 2 + 1
    for gates, memory, level in {(x["gates"], x["memory"], x["level"]) for x in scores}:
        exact = [x["exact"] for x in scores if (x["gates"], x["memory"], x["level"]) == (gates, memory, level)]
        of_level = rows[gates, memory]["exact"][written["levels"].index(level)]
        assert of_level == [round(sum(exact[0]) / len(exact[0]), 4)]
    assert {"write", "decay", "loss"} <= rows["facts", "gated_delta"].keys()
    assert all({"prose", "facts"} <= prediction.keys() for prediction in written["verdict"])


def test_processes_are_spawned_and_give_the_same_figures(tmp_path):
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    assert command(*TINY, "--levels", "2", "--json", one, NO_PICTURES) == 0
    assert command(*TINY, "--levels", "2", "--json", two, "--jobs", 2, NO_PICTURES) == 0
    first, second = (json.loads(path.read_text()) for path in (one, two))
    assert first["run"]["processes"] != second["run"]["processes"]
    assert all(first[part] == second[part] for part in ("scores", "gates", "verdict"))


def test_a_learned_file_can_be_tested_and_a_text_read(tmp_path, capsys):
    gates, text = tmp_path / "mine.json", tmp_path / "text.txt"
    assert command(*TINY, "--train", "facts", "--out", gates, "--steps", "1") == 0
    text.write_text("Some words of my own. " * 30)
    assert command(*TINY, "--gates", gates, "--text", text, "--levels", "2", NO_PICTURES) == 0
    assert "Gated delta rule" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--memories", "delta,elephant"), "elephant"),
        (("--train", "prose"), "go together"),
        (("--gates", "nothing.json"), "no gate set"),
        (("--text", "no-such-file.txt"), "no-such-file.txt"),
        (("--read", "no-such-file.json"), "no-such-file.json"),
        (("--read", "r.json", "--train", "prose", "--out", "g.json"), "choose one"),
    ],
)
def test_bad_options_give_a_one_line_error(words, problem, capsys):
    assert command(*TINY, *words, NO_PICTURES) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--jobs", "2")], ids=["one process", "two processes"])
@pytest.mark.parametrize(
    "names", [("tqdm",), ("rich",), ("threadpoolctl",), ("matplotlib",), ("tqdm", "matplotlib")], ids=" ".join
)
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
    hint = ", or --no-pictures" if names == ("matplotlib",) else ""
    assert done.stderr == f"linattn recall: {', '.join(names)} not installed: pip install 'linattn_np[lab]'{hint}\n"
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_pictures_alone_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(*TINY, "--levels", "1", NO_PICTURES) == 0
    assert "pictures" not in capsys.readouterr().out


def test_pictures_have_a_folder_by_default(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*TINY, "--levels", "1", "--gates", "facts") == 0
    assert "pictures: recall-output/ (5 files, " in capsys.readouterr().out
    assert len(list((tmp_path / "recall-output").iterdir())) == 5


def test_a_file_without_results(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"scores": []}')
    assert command("--read", tmp_path / "x.json", NO_PICTURES) == 2
    assert "x.json holds no results of linattn recall" in capsys.readouterr().err


def test_importing_the_package_does_not_import_the_lab():
    code = "import sys, linattn_np; assert not [m for m in sys.modules if m.startswith('linattn_np.experiments')]"
    subprocess.run([sys.executable, "-c", code], check=True)
