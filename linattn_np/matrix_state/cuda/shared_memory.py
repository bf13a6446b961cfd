"""Bytes of shared memory per block of every kernel, and of the buffers that kernels pass to one another.

Each CUDA source asserts at compile time that its layout has the size computed here.
"""

from __future__ import annotations

from typing import Any

from ...runtime.cuda.elements import BYTES
from .. import policy

PANEL = 64  # columns of a panel: rows of 128 bytes
BARRIER = 8


def round_up(n: int, to: int) -> int:
    """The smallest multiple of `to` that is at least n."""
    return -(-n // to) * to


def gram_bytes(element: str) -> int:
    """Bytes per element of a gram matrix."""
    return 2 if element == "bfloat16" else 4


def decay_sums(element: str, C: int) -> int:
    """Bytes of the cumulative log decays of a chunk (attention/decay.cuh); in float32 each is a pair of floats."""
    return (4 if element == "float32" else 3) * C * 4


def scan(kind: Any, warps: int, tiles: int, stages: int, separate: bool) -> int:
    """scan.cu. tiles: of 16 value rows, of all warps; separate: x of the dot products has a separate buffer.

    A stage holds k, v, q, x (in its buffer or in that of q) and log decays. In float32 without dot products the outputs
    reuse the buffer of the queries.
    """
    C, size, dots = policy.SCAN_CHUNK, BYTES[kind.element], kind.dots
    keys, values = C * round_up(kind.K, 16) * size, C * 16 * tiles * size
    reused = (kind.element == "float32" and not dots) or (dots and not separate)
    queries = 0 if not kind.outputs else max(keys, values) if reused else keys
    stage = keys + values + queries + values * (dots and separate) + C * 4
    gram = C * C * gram_bytes(kind.element) * kind.outputs
    return stages * stage + gram + warps * decay_sums(kind.element, C) + dots * (warps + 1) * C * 4


STAGE_DECAY = 4 * policy.GROUP_CHUNK * 4 + 16  # cumulative log decays of a stage (attention/producer.cuh)
RING = 2 * BARRIER  # per stage


def scan_wgmma(K: int, groups: int, stages: int, outputs: bool, dots: bool) -> int:
    """scan_wgmma.cu, and adds_wgmma.cu without outputs; groups: warpgroups of 64 value rows."""
    C, keys = policy.GROUP_CHUNK, round_up(K, PANEL)
    stage = C * 2 * (keys * (1 + outputs) + PANEL * groups * (1 + dots)) + STAGE_DECAY + RING
    return stages * stage + outputs * groups * C * C * 2 + dots * groups * 4 * C * 4 + 64


def levels_wgmma(K: int, groups: int, stages: int, dots: bool) -> int:
    """levels_wgmma.cu: stages of k and v, or q and x."""
    C, keys = policy.GROUP_CHUNK, round_up(K, PANEL)
    stage = C * 2 * (keys + PANEL * groups) + STAGE_DECAY + RING
    return stages * stage + dots * groups * 4 * C * 4 + 64


def writes_wgmma(width: int, groups: int, stages: int, dots: bool) -> int:
    """writes_wgmma.cu: stages of q, dout, k, v; R, P1, P2, dot products, row layouts."""
    C = policy.GROUP_CHUNK
    stage = 4 * C * width * 2 + STAGE_DECAY + RING
    return stages * stage + width * width * 2 + 2 * C * C * 2 + dots * groups * 4 * C * 4 + 112


def mark_bytes(K: int, tiles: int, wgmma: bool) -> int:
    """A warp's part of a checkpointed state: float32, or with wgmma bfloat16 padded to panels of 64 columns."""
    return tiles * 16 * (round_up(K, PANEL) * 2 if wgmma else round_up(K, 16) * 4)


# The delta rule by warpgroup products: chunks of 64 tokens, tiles of 128 columns in bfloat16.
TILE, SQUARE, TOKEN = 64 * 128 * 2, 64 * 64 * 2, 64 * 4  # bytes: of 128 columns, of 64, of one number per token
DELTA_STATE = 128 * 128  # floats of a segment's state
TRANSFER = 128 * 4 + 128 * 128 * 2  # bytes of a transfer matrix: its diagonal in float32, the rest in bfloat16
DELTA_END = 128 * 128 * 2  # bytes of a chunk's state in bfloat16
DELTA_ENDS = DELTA_END + 8 * TOKEN  # and of its gradient, followed by dW.v over 16 value columns each
_STAGE = 3 * TILE + 2 * SQUARE + 1024


def delta_checkpoint(unit: bool) -> int:
    """Stored factors of a chunk: T_inv, e, d, b, beta; with `unit` also 1 / |k| and 1 / |q|."""
    return SQUARE + (4 + 2 * unit) * TOKEN


def delta(name: str, unit: bool) -> int:
    """delta_*.cu by name: block, chain, adds, segments, reverse, grads."""
    return {
        "block": SQUARE + delta_checkpoint(unit) + 2 * TOKEN + 32,
        "chain": 3 * _STAGE + 128,
        "adds": 2 * (TILE + 2 * SQUARE + 1024) + 64,
        "segments": 6 * TRANSFER + 2 * 16 * 272 + 64,
        "reverse": 3 * _STAGE + DELTA_END,
        "grads": 8 * TILE + 2 * DELTA_END + 2 * SQUARE + 2 * delta_checkpoint(False) + (3 * 64 + 16) * 4 + 96,
    }[name]


# Vector decay by warpgroup products.
def vector_stages(name: str, gate: str, bounded: bool = False) -> int:
    """Chunks of a ring; bounded: of a scan whose gates are declared to be small."""
    if bounded or (name == "adds" and gate == "bfloat16"):
        return 3 if gate == "float32" else 4
    return 4 if name == "transfers" else 2


VECTOR_HANDED = DELTA_STATE * 4 + 16  # of a block of a scan: a state, a word that says that it is there
VECTOR_FACTORS = 2 * TILE + 512  # of a chunk in memory: -W, Kd, its decay
VECTOR_INVERSE = SQUARE + TOKEN  # N, strengths


def vector(name: str, gate: str, bounded: bool = False, two_term_keys: bool = False) -> int:
    """vector_*.cu by name: scan, adds, segments, inverse, chain, transfers.

    A stage has q, k and log decays; two of values; scaled tiles of 16 rows; decays of blocks. Beside them: dots with
    the bonus, decays of the stages; keys of the chain, decays of a chunk; two numbers a token. Transfers: stages of
    factors, two of values with their inverse, half of a state as an operand. bounded: a scan without scratch.
    two_term_keys: of a scan; decays of float32 lie in the stages.
    """
    gates, stages = TILE * BYTES[gate] // 2, vector_stages(name, gate, bounded)
    tile, decays = 16 * 256, 4 * 128 * 4
    ring, values = stages * (2 * TILE + gates), round_up(TILE + VECTOR_INVERSE, 1024)
    narrow, keys = gate == "bfloat16", two_term_keys and not bounded
    scaled = 13 + keys * (3 + 4 * narrow)
    return {
        "scan": ring
        + 2 * TILE
        + (not keys or narrow) * stages * 512
        + (240 if bounded else 160 + scaled * tile + decays + 2 * TOKEN),
        "adds": ring + decays + 64,
        "segments": 0,
        "segments in reverse": 0,
        "inverse": TILE + gates + 5 * tile + decays + 2 * TOKEN + 32,
        "chain": ring + (4 + narrow) * TILE + 8 * tile + decays + 512 + TOKEN + 160,
        "transfers": 1024 + stages * round_up(VECTOR_FACTORS, 1024) + 2 * (values + TILE),
    }[name]


# The backward of a vector decay by warpgroup products.
VECTOR_TABLE = 8 * PANEL * 4  # a number a slice of 8 tokens and channel, of 64 channels
BONUS_CHANNELS = 32  # of a block of vector_bonus.cu


def vector_gram(erase: bool) -> int:
    """Of a chunk's P in two terms, with erase in one."""
    return (2 - erase) * SQUARE


def vector_state(erase: bool) -> int:
    """Of the state before a chunk in bfloat16, without erase four bits more of each number (tile/low_bits.cuh)."""
    return DELTA_END if erase else DELTA_END + 128 * 128 // 2


def vector_ends(erase: bool) -> int:
    """Of a chunk's G, the gradient of the state after it, as a state; with erase dW.v over 16 value columns each."""
    return DELTA_ENDS if erase else vector_state(erase)


def vector_reverse(erase: bool) -> int:
    """vector_reverse.cu.

    Stages of q, k in two terms, dO, P in two terms (erase: k twice, P in one, A);
    G after a chunk, tables of two chunks, decays, barriers (v, dW.v).
    """
    stages = 2
    stage = 4 * TILE + 2 * SQUARE + erase * 1024
    small = 2 * 2 * VECTOR_TABLE + stages * 512 + erase * (TILE + 8 * TOKEN) + (3 * stages + 1) * BARRIER
    return stages * stage + DELTA_END + small


def vector_gradients(erase: bool, exact: bool) -> int:
    """vector_grads.cu: copies, halves of S and G, dO, V (erase: dW too), Z, tables; exact: flags, what is given.

    Without erase second terms have places of their own (Z's where it is exact); exact copies with erase have none.
    """
    copies, tiles, spare = 2 + erase, 2 + erase, 2 * exact if erase else 3 + exact
    size = (copies + spare) * SQUARE + DELTA_END + tiles * TILE + 3 * VECTOR_TABLE + 3 * TOKEN + 2 * BARRIER
    return round_up(size + 32, 1024) + TILE + VECTOR_TABLE if exact else size


# A free rank-one term with a vector decay.
def free_tile(width: int) -> int:
    """Rows of a chunk, `width` columns in whole panels."""
    return policy.GROUP_CHUNK * round_up(width, PANEL) * 2


def free_factors_of(K: int) -> int:
    """A chunk's factors in memory: four tiles of rows, three of pairs, the decay of the chunk, a diagonal of pairs."""
    return 4 * free_tile(K) + 3 * SQUARE + round_up(K, PANEL) * 4 + TOKEN


def free_extras_of(backward: bool) -> int:
    """What the backward's chain reads besides: A_ab and inverses of its diagonal blocks."""
    return (SQUARE + 4 * FREE_INVERSE) * backward


FREE_BLOCK = 16 * 16 * 2  # of 16 rows and columns in bfloat16
FREE_DIAGONAL, FREE_INVERSE = 16 * 20 * 4, 2 * FREE_BLOCK  # a diagonal block in float32; its inverse in two terms


def free(name: str, K: int, V: int, gate: str, build: Any) -> int:
    """free_*.cu by name: factors, chain, grads, exact grads.

    factors: four tiles, four squares, decays of blocks and chunk, diagonal blocks (or their inverses), what rounding
    leaves of the others; pairs of neighbours, above 64 channels four a token, else one;
    exact: four tiles more. chain: two stages of factors, three of values (one or two where outputs do not leave
    through them), extras. grads: four tiles, values and states (then pairs and second terms, then sums), second terms
    of two pairs, log decays, decays of blocks (within those second terms if nothing else lies there). exact grads:
    log decays or pairs inside blocks of 16 rows, four floats each, what lies between two blocks, flags of 16 warps.
    """
    keys, values = free_tile(K), free_tile(V)
    if name == "factors":
        small = 5 * 128 * 4 + 4 * FREE_DIAGONAL + 6 * FREE_BLOCK + 64 + (4 if K > PANEL else 1) * TOKEN
        return round_up(4 * keys + 4 * SQUARE + small, 1024) + build.exact * 4 * keys
    if name == "chain":
        extras = free_extras_of(build.backward)
        slots = 3 if not build.keep or values > keys else 1 if build.backward and K <= PANEL else 2
        return 2 * round_up(free_factors_of(K), 1024) + slots * values + extras + 128
    operands = 4 * values + 2 * round_up(K, PANEL) * round_up(V, PANEL) * 2
    operands_or_sums = max(operands, 4 * round_up(K, PANEL) * policy.GROUP_CHUNK * 4)
    gates, decays, small = keys * BYTES[gate] // 2, 4 * 128 * 4, 128 * 4 + 32
    if name == "exact grads":
        return 4 * keys + operands_or_sums + max(gates, policy.GROUP_CHUNK * 16 * 16) + decays + small + 32 + 16 * 8
    rests = 4 * SQUARE + 3 * keys
    past_operands, narrow = rests >= operands, gate == "bfloat16"
    rests = rests if past_operands or not narrow else operands_or_sums
    decays_within = (past_operands or narrow) and rests + SQUARE >= operands_or_sums
    return 4 * keys + max(operands_or_sums, rests + 2 * SQUARE) + gates + decays * (not decays_within) + small


# Gradients token by token.
def recurrence_tokens(V: int) -> int:
    """Tokens that a block loads at a time."""
    return 16 if V <= 128 else 8


def recurrence_values(kind: Any) -> int:
    """token/values.cu: of each token q, k, decays (a, b) and 128 values."""
    return recurrence_tokens(kind.V) * ((3 + 2 * kind.erase) * round_up(kind.K, 32) + 128) * 4


def recurrence_channels(kind: Any) -> int:
    """token/channels.cu: of each token v, dO (w, dw), 32 channels of q, k, decays (a, b), products
    of values, sums of 8 warps."""
    pairs, tokens = 1 + kind.erase, recurrence_tokens(kind.V)
    values, cells = 2 * pairs * round_up(kind.V, 128), (3 + 2 * kind.erase + 8 * pairs) * 32
    return (tokens * (values + cells + 4) + 32) * 4


# The portable chunks of a vector decay.
PORTABLE_ROW, PORTABLE_COLUMN = 20, 24  # floats of a row of 16 that is read in fours; of one that is read in pairs


def portable_values(kind: Any, warps: int, back: bool = False) -> int:
    """portable/values.cu: stages of q, k, g; rows of a warp; pairs, their sums; scaled rows and columns."""
    C, keys, erase, square = policy.PORTABLE_CHUNK, round_up(kind.K, 16), kind.erase, 4 * policy.PORTABLE_CHUNK**2
    rounds, active = -(-keys // 16 // warps), min(keys // 16, warps)
    stages = rounds * (2 * BYTES[kind.element] + BYTES[kind.gate]) * 8 * 32 * warps
    rows = warps * (2 + erase) * C * PORTABLE_ROW * 4
    pairs = (1 + erase) * (active * square + C * PORTABLE_COLUMN * 4) + erase * C * (PORTABLE_ROW + 1) * 4
    buffers = 1 if kind.K > policy.WIDEST_GROUP or kind.erase else 2
    erased = erase * (keys * PORTABLE_COLUMN if back else C * (keys + 8)) * 4
    return stages + rows + pairs + C * (keys + 8) * 4 + erased + buffers * keys * (PORTABLE_COLUMN + 1 + kind.long) * 4


def portable_channels(kind: Any, warps: int, back: bool = False) -> int:
    """portable/channels.cu: stages of q, k, g, v, dO; rows of a warp; products of pairs; rows and columns."""
    C, values, size, erase = policy.PORTABLE_CHUNK, round_up(kind.V, 16), BYTES[kind.element], kind.erase
    rounds, active = -(-values // 16 // warps), min(values // 16, warps)
    reads, writes = 1 + (erase and not back), 1 + (erase and back)
    written = 2 * BYTES["float32"] if erase else size
    stages = (2 * size + BYTES[kind.gate] + rounds * (size + written)) * 8 * 32 * warps
    pairs = (1 + erase) * (active * C * C + C * PORTABLE_ROW) * 4
    small = warps * ((2 + writes + erase) * C * PORTABLE_ROW + (1 + kind.long) * C) * 4 + pairs
    return stages + small + reads * C * (values + 8) * 4 + writes * values * PORTABLE_COLUMN * 4


# The portable delta rule.
def delta_chunk(element: str) -> int:
    """Tokens of a chunk of the portable delta rule."""
    return policy.DELTA_CHUNK[element]


def delta_state(kind: Any) -> int:
    """Bytes of the state of a chunk in memory."""
    return round_up(kind.K, 16) * round_up(kind.V, 16) * gram_bytes(kind.element)


def delta_inverse_bytes(element: str) -> int:
    """Bytes of T_inv of a chunk in memory."""
    return delta_chunk(element) ** 2 * gram_bytes(element)


def delta_inverse(kind: Any) -> int:
    """delta_inverse.cu: keys (and erase keys), whose buffer T_inv reuses; L; diagonal blocks; numbers per token."""
    C, size = delta_chunk(kind.element), BYTES[kind.element]
    factors = 2 if kind.element == "bfloat16" else 4
    keys = max(C * round_up(kind.K, 16) * size * (1 + kind.separate_erase_key), C * C * gram_bytes(kind.element))
    return keys + C * C * factors + C * 80 + 2 * C * 4 + decay_sums(kind.element, C)


def delta_chain(kind: Any, warps: int, rows: int, cut: Any, reads: bool, over_beta: bool) -> int:
    """delta_scan.cu, delta_scan_reverse.cu. rows: value rows; reads: with queries; over_beta: divides by beta."""
    C, size, gram = delta_chunk(kind.element), BYTES[kind.element], gram_bytes(kind.element)
    keys = C * round_up(kind.K, 16) * size
    stage = keys * (1 + kind.separate_erase_key) + C * rows * size + C * C * gram + (1 + over_beta) * C * 4
    queries = reads * (cut.queries * keys + C * C * gram)
    return cut.stages * stage + queries + warps * decay_sums(kind.element, C)


def delta_grads(kind: Any, groups: int, piece: int) -> int:
    """delta_scan_grads.cu. groups: of warps side by side; piece: key columns at a time."""
    C, size, gram, V = delta_chunk(kind.element), BYTES[kind.element], gram_bytes(kind.element), round_up(kind.V, 16)
    columns = V * piece * gram + C * piece * size * (2 + kind.separate_erase_key)
    small = decay_sums(kind.element, C) + 2 * C * 4 + groups * 3 * C * 4 + 64
    return 3 * C * V * size + 2 * C * C * gram + small + columns + (C * piece * 2 if size == 2 else 0)
