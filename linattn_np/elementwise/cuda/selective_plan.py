"""Constants of the kernels of the selective scan: lanes of a channel, tokens of a tile, threads."""

from __future__ import annotations

from typing import NamedTuple

MOST, MOST_DOUBLE = 128, 64  # numbers of a state
STEP_THREADS, STEP_EACH = 64, 4  # of a block; sequences of a thread
SYSTEM_PART = 8  # tokens whose states a lane of a constant system holds
SEGMENT, FEWEST = 512, 3  # tokens of a segment, segments of a sequence: at least


class Grid(NamedTuple):
    """How a pass lies on lanes; blocks: of a multiprocessor, which registers are allotted for."""

    lanes: int  # of a channel
    states: int  # of a lane
    threads: int
    tile: int  # tokens
    blocks: int
    part: int = 4  # tokens whose states a lane holds

    @property
    def channels(self) -> int:
        """Of a block."""
        return self.threads // self.lanes

    def constants(self, double: bool) -> dict[str, int]:
        """LA_* of the sources."""
        return {"LA_LANES": self.lanes, "LA_STATES": self.states, "LA_THREADS": self.threads, "LA_TILE": self.tile,
                "LA_BLOCKS": self.blocks, "LA_PART": self.part, "LA_DOUBLE": int(double)}  # fmt: skip


def least_power(n: int) -> int:
    """The least power of 2 from n on."""
    return 1 << max(n - 1, 0).bit_length()


def tile_of(N: int, double: bool) -> int:
    """Tokens from one kept state to the next."""
    most = 32 if double else 64
    return 8 if most < N else 16


def forward(N: int, double: bool) -> Grid:
    """8 numbers of a state a lane; two lanes a channel for N = 16."""
    states = 8 if N > 4 else 4
    return Grid(least_power(-(-N // states)), states, 128, tile_of(N, double), 2 if double else 4)


def backward(N: int, double: bool) -> Grid:
    """8 numbers a lane as forwards, up to 8 lanes a channel: wider states have more a lane; 4 numbers of float64."""
    most = 4 if double or N <= 4 else 8
    lanes = min(least_power(-(-N // most)), 8)
    states = 4 * -(-N // (4 * lanes))
    blocks = (2 if states == 4 else 1) if double else 4 if N <= 32 else 3 if states <= 8 else 1
    return Grid(lanes, states, 128, tile_of(N, double), blocks)


def step(N: int, double: bool) -> Grid:
    """4 numbers a lane."""
    return Grid(least_power(-(-N // 4)), 4, STEP_THREADS, 1, 1)


def system(N: int, double: bool) -> Grid:
    """Of a constant system: 2 complex numbers a lane, longer tiles for wider states, which are stored before them."""
    lanes = least_power(-(-N // 4))
    tile = min(max(8 * lanes, 16), 32 if double else 128)
    return Grid(lanes, 4, 128, tile, 2 if double else 4, SYSTEM_PART)


def segments(blocks: int, tokens: int, resident: int, tile: int) -> tuple[int, int]:
    """(segments of a sequence of so many tokens, tokens of one), if there are `blocks` blocks without.

    resident: blocks that run at once.
    """
    count = min(resident // max(blocks, 1), tokens // SEGMENT)
    if count < FEWEST:
        return 1, max(tokens, 1)
    each = -(-tokens // (count * tile)) * tile
    return -(-tokens // each), each
