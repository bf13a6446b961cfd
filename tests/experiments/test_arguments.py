"""Lists on a command line."""

import argparse

import pytest

from linattn_np.experiments.arguments import several


@pytest.mark.parametrize("words", [["1,2,30"], ["1", "2", "30"], ["1,2", "30"], ["1,", "2,", "30"]])
def test_a_list_has_commas_or_blanks(words):
    parser = argparse.ArgumentParser()
    several(parser, "--lengths", int, default=(7,))
    assert parser.parse_args(["--lengths", *words]).lengths == (1, 2, 30)
    assert parser.parse_args([]).lengths == (7,)


def test_what_is_no_number_is_named(capsys):
    parser = argparse.ArgumentParser()
    several(parser, "--lengths", int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--lengths", "1,x"])
    assert "argument --lengths: invalid int value: '1,x'" in capsys.readouterr().err
