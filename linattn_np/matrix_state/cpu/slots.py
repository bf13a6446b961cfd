"""What is kept of each chunk of a segment between a walk forward and the walk back, and what a walk begins with."""

from __future__ import annotations

from .interpreter.program import HEAD, STATE, Program

MEMORY = 10 << 20  # bytes that the slots of a thread take


class Slots:
    """A slot a chunk, all alike; views of one slot's parts are turned to it when its chunk's turn comes."""

    def __init__(self, p: Program):
        self.p, self.begin, self.following = p, p.bytes, p.register()
        self.pairs: list[tuple[int, int]] = []
        self.ahead: list[tuple[int, int]] = []

    def view(self, base: int) -> int:
        """A view of one slot's own part, of which `base` is the first."""
        self.pairs.append((self.p.view(), base))
        return self.pairs[-1][0]

    def next(self, base: int) -> int:
        """The same of the slot after it; behind the last slot is none."""
        self.ahead.append((self.p.view(), base))
        return self.ahead[-1][0]

    def close(self, most: int) -> int:
        """How many there are: as many as fit, at most `most`."""
        self.step = self.p.bytes - self.begin
        count = max(1, min(most, MEMORY // max(self.step, 1)))
        self.p.bytes += self.step * (count - 1)
        return count

    def place(self, n: int) -> None:
        """Turn the views to slot n."""
        self.p.add(self.following, n, self.p.literal(1))
        for number, pairs in ((n, self.pairs), (self.following, self.ahead)):
            for view, base in pairs:
                self.p.place(view, base, number, self.step)


def begin_states(
    p: Program, parts: list[tuple[int, int, int]], K: int, first: int, array: int | None, between: tuple[int, int]
) -> None:
    """Matrices of a head, (matrix, first column, columns) each, as a task finds them.

    Where the register `first` is 1 they are the call's, of `array` (None: zeros), else what another task left: the
    array and the register of its row in `between`.
    """
    zero, one = p.literal(0), p.literal(1)
    with p.only_if(first, one):
        for part, column, columns in parts:
            if array is None:
                p.clear(part, zero, K, columns)
            else:
                p.state(part, array, STATE, HEAD, K, column, columns)
    with p.only_if(zero, first):
        for part, column, columns in parts:
            p.state(part, between[0], between[1], HEAD, K, column, columns)
