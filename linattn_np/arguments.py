"""Options of a command line; a wrong one ends the command with status 2 and one line, the option and its values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def number(parser: argparse.ArgumentParser, option: str, least: int = 1, **about: Any) -> None:
    """An option that takes one whole number from `least`."""
    parser.add_argument(option, action=Number, least=least, metavar="N", **about)


def real(parser: argparse.ArgumentParser, option: str, least: float = 0.0, **about: Any) -> None:
    """An option that takes one number from `least`."""
    parser.add_argument(option, action=Real, least=least, metavar="X", **about)


def numbers(parser: argparse.ArgumentParser, option: str, least: int = 1, **about: Any) -> None:
    """An option that takes whole numbers from `least`: --option 1,2,3 or --option 1 2 3."""
    parser.add_argument(option, action=Number, nargs="+", least=least, metavar=about.pop("metavar", "N"), **about)


def words(parser: argparse.ArgumentParser, option: str, **about: Any) -> None:
    """An option that takes words: --option a,b,c or --option a b c."""
    parser.add_argument(option, action=Words, nargs="+", **about)


class Words(argparse.Action):
    """The words of an option, in one tuple."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if not parts(values):
            parser.error(f"{self.option_strings[0]} is {' '.join(values)}, expected one word or more")
        setattr(namespace, self.dest, parts(values))


class Number(argparse.Action):
    """One whole number from `least`, or with nargs="+" a tuple of them."""

    def __init__(self, *args: Any, least: int, **about: Any) -> None:
        super().__init__(*args, **about)
        self.least = least

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        found = [whole_number(part) for part in (parts(values) if self.nargs else (values,))]
        if not found or any(n is None or n < self.least for n in found):
            given = " ".join(values) if self.nargs else values
            wanted = "whole numbers" if self.nargs else "a whole number"
            parser.error(f"{self.option_strings[0]} is {given}, expected {wanted} from {self.least}")
        setattr(namespace, self.dest, tuple(found) if self.nargs else found[0])


class Real(argparse.Action):
    """One finite number from `least`."""

    def __init__(self, *args: Any, least: float, **about: Any) -> None:
        super().__init__(*args, **about)
        self.least = least

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        try:
            found = float(values)
        except ValueError:
            found = math.nan
        if not self.least <= found < math.inf:
            parser.error(f"{self.option_strings[0]} is {values}, expected a number from {self.least:g}")
        setattr(namespace, self.dest, found)


def parts(values: Sequence[str]) -> tuple[str, ...]:
    """What stands between commas and blanks."""
    return tuple(part for text in values for part in text.split(",") if part)


def whole_number(text: str) -> int | None:
    """The number that a text is, None for another text."""
    try:
        return int(text)
    except ValueError:
        return None
