"""Options of the command line: every number and every input file that a command does not take has a one-line error."""

from __future__ import annotations

import argparse
import importlib

import numpy as np
import pytest

from linattn_np.__main__ import COMMANDS, main
from linattn_np.arguments import Number, numbers, words


def parser_of(name):
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0], "linattn_np").add_arguments(parser)
    return parser


NUMBERS = [(name, action) for name in COMMANDS for action in parser_of(name)._actions if isinstance(action, Number)]


def fails(argv, capsys):
    """The line on standard error of a command that ends with status 2."""
    try:
        status = main([str(x) for x in argv])
    except SystemExit as done:
        status = done.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert printed.err.startswith(f"linattn {argv[0]}: ")
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def test_all_numbers_are_in_the_table():
    assert not [(name, a.dest) for name in COMMANDS for a in parser_of(name)._actions if a.type in (int, float)]
    assert {(name, action.dest) for name, action in NUMBERS} >= {
        ("bench", "heads"),
        ("bench", "lengths"),
        ("compare", "seeds"),
        ("train", "layers"),
        ("warmup", "key"),
    }


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1.5", "many", "", ","])
@pytest.mark.parametrize(("name", "action"), NUMBERS, ids=lambda x: x if isinstance(x, str) else x.dest)
def test_wrong_numbers_have_one_line(name, action, value, capsys):
    option, value = action.option_strings[0], "-2" if value == "0" and not action.least else value
    wanted = f"whole numbers from {action.least}" if action.nargs else f"a whole number from {action.least}"
    assert fails([name, option, value], capsys) == f"linattn {name}: {option} is {value}, expected {wanted}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_options_have_one_line(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, *(["gla"] if name == "docstring" else []), "--elephant"])
    assert done.value.code == 2
    assert capsys.readouterr().err == "linattn: unrecognized arguments: --elephant\n"


def header(shape):
    """The first bytes of a file .npy of float64."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


FILES = {
    "empty": b"",
    "wrong magic": b"elephant" * 20,
    "not UTF-8": b"a,b\n\xff\xfe,1\n",
    "huge": header(f"({72 << 37},)"),  # 72 TiB
    "wide": header(f"({1 << 40}, {1 << 40})"),  # more bytes than 64 bits count
    "cut": header("(100,)") + bytes(80),
    "objects": header("(4,)").replace(b"<f8'", b"|O' ") + bytes(32),
}  # fmt: skip
READERS = [(*words, ending) for words in (("bench",),) for ending in (".npy", ".npz", ".csv")]


def write(folder, kind, ending):
    path = folder / f"x{ending}"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(FILES[kind])
    return path


@pytest.mark.parametrize("kind", [*FILES, "directory", "missing"])
@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_wrong_files_have_one_line(reader, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, kind, reader[-1])
    line = fails([*reader[:-1], path], capsys)
    assert path.name in line
    assert len(line) < 400


@pytest.mark.parametrize("kind", ["huge", "wide", "cut", "objects"])
def test_wrong_members_of_an_npz_have_one_line(kind, tmp_path, monkeypatch, capsys):
    import zipfile

    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("x.npz", "w") as file:
        file.writestr("one.npy", FILES[kind])
    for path in ("x.npz", "x.npz:one"):
        assert "x.npz" in fails(["bench", path], capsys)


@pytest.mark.parametrize(("kind", "ending"), [("empty", ".txt"), ("directory", ".txt"), ("missing", "")])
def test_wrong_texts_have_one_line(kind, ending, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "x" in fails(["bench", write(tmp_path, kind, ending)], capsys)


@pytest.mark.parametrize("argv", [("probe", "--json"), ("probe", "--markdown")], ids=" ".join)
def test_a_folder_is_no_output_file(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path} is a folder" in fails([*argv, tmp_path], capsys)


@pytest.mark.parametrize("words_", [["1,2,30"], ["1", "2", "30"], ["1,2", "30"], ["1,", "2,", "30"]])
def test_a_list_has_commas_or_blanks(words_):
    parser = argparse.ArgumentParser()
    numbers(parser, "--lengths", default=(7,))
    words(parser, "--names")
    assert parser.parse_args(["--lengths", *words_]).lengths == (1, 2, 30)
    assert parser.parse_args(["--names", *words_]).names == ("1", "2", "30")
    assert parser.parse_args([]).lengths == (7,)


def test_files_that_are_whole_are_read(tmp_path):
    from linattn_np.experiments.series import load

    (tmp_path / "x.npy").write_bytes(header("(10,)") + np.arange(10.0).tobytes())
    assert load(str(tmp_path / "x.npy")).x.shape == (10, 1)
