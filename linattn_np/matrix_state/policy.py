"""Every threshold and size of the matrix-state core, each with its reason, and the defaults of form and chunk size.

The form depends only on the length of the sequence, the chunk size on the library and the kind of memory: the same
sequence gives the same bits alone, in a batch and in a ragged batch.
"""

from __future__ import annotations

import os
from typing import Any

from ..runtime.arrays import is_cupy, is_numpy
from ..runtime.config import config
from .types import Erase, Inputs, Plan

# chunks

ARRAY_CHUNK = 64  # tokens of a chunk in array calls, and of a tile of the parallel form
NUMPY_CHUNK = 32  # the same on NumPy: work quadratic in the chunk costs more than short products
CPU_CHUNK, SHORT_CPU_CHUNK = 32, 16  # tokens of a chunk of the compiled loops; the second where tokens are erased, or
SHORT_CPU_WIDTH = 64  # of decaying channels, at most: work that grows with the chunk, against passes over the state
LONGEST_CPU_CHUNK = 128  # longest chunk of the compiled loops
SCAN_CHUNK = 32  # CUDA scan without erase: with 64 tokens outputs leave too few registers for the state
GROUP_CHUNK = 64  # CUDA warpgroup products: the rows of one
DELTA_CHUNK = {"bfloat16": 64, "float16": 64, "float32": 32}  # CUDA, portable delta rule: limited by shared memory

# longest sequences that use the recurrent form by default

SHORT_ARRAY = 4  # array calls: up to here the recurrence costs less than the set-up of a chunk
SHORT_CPU = 31  # compiled loops: less than a chunk
SHORT_CPU_PLAIN = 15  # the same where a chunk is cheap: no erase, and decay NONE or SCALAR
FLOAT32_RECURRENCE = 4096  # CUDA kernels, tokens in float32: rounding a decay near 1 once a token adds up, with log
# decays of up to 2e-4 to an error of 3e-5 in 32768 tokens
SHORT_CUDA = 16  # CUDA kernels: one kernel that reads the state once, against two or three for chunks

# array calls

PAIR_TOKENS = 8  # a decay table sums every pair of tokens of a block this long: its work grows with the length
CHECKPOINT_CHUNKS = 16  # chunks between two stored states: the backward holds the states of this many chunks at once
BATCH_ELEMENTS = 2**18  # of one array of a batch of chunks, which share library calls: 1 MiB of float32 stays in cache
BLOCK_ELEMENTS = 2**15  # of one array of a chunk, over the heads of a block: 128 KiB of float32 stay in cache
THREADED_ELEMENTS = 2**18  # of v, from which threads are worth starting
MATRIX_ELEMENTS = 2**21  # SOLVED read-outs: of the matrices Z_t that the exact solver forms in one batch, 16 MiB
VECTOR_ELEMENTS = 2**15  # and of the vectors that conjugate gradients iterate in one batch: they stay in cache

# array calls on CuPy: calls take the time, not operations

SCAN_BYTES = 1 << 30  # of one table of decays, over the heads whose chunks are computed at once
SCAN_HEAD_BYTES = 64 << 20  # the same of one head, up to which all chunks are: 16384 tokens of 128 channels

# polynomials of q . k, by array calls

POLYNOMIAL_BYTES = 256 << 20  # of arrays beside inputs and outputs: heads are computed in groups that need no more
POLYNOMIAL_TILE = 512  # tokens of a tile without features: longer ones waste half a tile above the diagonal
LONGEST_DIRECT = 4096  # tokens that see each other without features: 36 pairs of tiles

# compiled loops

CPU_COLUMNS = 32  # value columns: a state is shared out in multiples of it where there are fewer heads than threads
STEP_COLUMNS = 128  # the same of the recurrent form
LEVEL_TOKENS = 4096  # of a sequence whose levels are updated token by token: memory grows with them
STEP_TOKENS = 32  # tokens of the recurrent form whose vectors are in memory at once
DECAY_BLOCK = 16  # tokens of a sub-block of a vector decay: pairs inside, a product with those before
GATE_FLOOR = -1.0e4  # a log decay below it means the same as -inf, and sums of it stay finite
FEATURE_HEADS = 8  # of one token whose features are computed at once: with a query each two rows of register tiles
FEW_OPERATIONS = 2e6  # of a call: below, threads cost more than they gain
MANY_OPERATIONS = 2e9  # a longer call is split after this many, a fraction of a second, so that it can be interrupted
APART_OPERATIONS = 2e7  # of a call from which on few heads go backward by blocks of time at once
FEW_BYTES = 2**22  # of states streamed by the recurrent form: below, threads cost more than they gain
UNIT_ELEMENTS = 2**15  # numbers of a task that divides rows by their length
CHECKPOINT_BYTES = 10 << 20  # of the states of chunks that an adjoint stores at once, for each thread, if it can choose
TIME_BLOCK = 256  # tokens after which heads alternate: cache lines shared with a neighbour are still in the cache
ALTERNATING_HEADS = 8  # heads that alternate, at most
CACHED_TASKS = 1024  # of a call, up to which they are cached for the next: 96 bytes each
STORED_BYTES = 8 << 20  # of states between blocks of time that a forward stores for its backward: longer blocks above
LONGEST_BLOCK = 2048  # tokens of a block of time of a backward: of 128 channels its states are 6 % of its keys

# CUDA: the device

WIDEST_CUDA = 256  # largest key and value width of the kernels: a wider state leaves no registers
WIDEST_GROUP = 128  # the same of warpgroup products: a 128 x 128 state takes 64 registers a thread in two warpgroups
NARROWEST_GROUP = 40  # scans by warpgroup products: narrower than half a panel of 64 columns wastes most of it
ROW_BYTES = 16  # asynchronous copies: every row's address and length are a multiple of it
REGISTERS = 65536  # of a multiprocessor
LEAST_SHARED = 99 * 1024  # bytes of shared memory that a block can have on any device from compute capability 80 on
GROUP_SHARED = 227 * 1024  # the same on compute capability 90; 1024 less than a multiprocessor has
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")  # read once: replayed calls do not look

# CUDA: levels

LEVEL_BYTES = 4 << 30  # of the values of the levels that are computed at once: of one array of several

# CUDA: scans and delta rules

SCAN_STAGES = 3  # chunks in flight: one is computed while two arrive
SCAN_REGISTERS = {"bfloat16": 70, "float16": 110, "float32": 130, "tf32": 110}  # of a thread beside its accumulators
MARK_TOKENS = {"bfloat16": 256, "float16": 256, "float32": 32, "tf32": 256}  # from one <S, dS> to the next: the sum of
# the gate gradient restarts there; 512 save 1 to 2 % of the time and add half to the error of the worst head. In
# float32 128 save 3 to 5 %; gradients of decay rates, sums over tokens that cancel, have three to four times the error
SEGMENT_TOKENS = 512  # least length of a segment of a scan: shorter ones cost more in sums than they gain in blocks
SEGMENT_CHUNKS = 8  # the same of delta rules
DELTA_STEPS = (1, 2, 4, 8)  # micro-steps of a token, with which a chunk of GROUP_CHUNK holds whole tokens
EXACT_PIECES = 4  # blocks of a head that recompute its chunks whose decays need the exact form: one wave of 256 heads
VECTOR_RESIDENT = {"inverse": 4}  # blocks per multiprocessor of vector decays: registers
FACTORS_RESIDENT = 4  # the same of inverses that store factors of segments
RECURRENCE_BACKWARD = True  # kernels of gradients token by token; tests turn them off to reach the array calls
PORTABLE_CHUNKS = True  # portable chunks of vector decays; tests turn them off to reach the kernels token by token
RECURRENCE_MARK = 128  # tokens from one <S, R> of those kernels to the next: the sum of the gate gradient restarts
RECURRENCE_COLUMNS, RECURRENCE_CHANNELS = 128, 32  # of a block: value columns of the one, key channels of the other
PORTABLE_CHUNK = 16  # tokens of a chunk of them: the pairs that a lane traverses; products of mma.sync
PORTABLE_COLUMNS = 128  # of a block of portable chunks of a vector decay: 16 a warp
PORTABLE_RESIDENT = 2  # blocks of a multiprocessor of portable chunks
PORTABLE_SEGMENTS = 3  # least number of segments of a sequence: states at their ends cost a pass more, or two
BOUNDED_NATS = 64.0  # that a channel may lose in a chunk with one reference: quotients and queries stay normal numbers
REVERSE_SEGMENTS = 3  # segments from which on the reverse chain of a delta rule runs twice, in pieces
ROW_WARPS = 8  # rows of a block that makes a free term of the delta rule, a warp each
EXACT_GRADIENT_BLOCKS = 2  # blocks per multiprocessor of the kernel of exact gradients, run sequentially

# CUDA: the kernel of a few tokens

STEP_WARPS = 2  # of a block, each with its own columns
TOKEN_WARPS = 4  # of a block of the kernel of one token: eight are 1 % faster, and need 16 additions more a sum
TOKEN_RESIDENT = 16  # warps of that kernel on a multiprocessor
SOLVE_THREADS = 256  # of the block that solves the systems of one token and head: at most as many unknowns
WIDEST_SYSTEM = 128  # unknowns of the systems of a chunk: more do not fit the shared memory of a block
SYSTEM_CHUNKS = (128, 64, 32)  # tokens of such a chunk: the first that fits
SYSTEM_STEPS = 2  # steps by default, times the number of unknowns: few systems need a fifth of it
SUM_CHAINS = 8  # chains of rows that a sum is added from (tile/columns.cuh)
WHOLE_ROW_STATES = 256  # 16-bit states from which on a warp requests whole rows of 256 bytes
L1_BYPASS_BYTES = 128 << 20  # of states up to which they bypass the L1 cache: measured on a device with 60 MB of L2


def array_chunk(plan: Plan, T: int) -> int:
    """C of array calls; the parallel form uses tiles of the default length."""
    return ARRAY_CHUNK if is_parallel(plan, T) else int(plan.chunk_size or default_array_chunk(plan))


def default_array_chunk(plan: Plan) -> int:
    """The default C of array calls."""
    return NUMPY_CHUNK if is_numpy(plan.xp) else ARRAY_CHUNK


def chunk_states(core: Inputs, plan: Plan, T: int) -> str:
    """How array calls propagate the state of T tokens: chunks of a GPU are computed at once if nothing is erased.

    The backward of a decay on both axes makes 1,200 array calls a chunk, which one after the other take 20 ms and more.
    """
    if plan.chunk_states is not None or not is_cupy(plan.xp):
        return plan.chunk_states or "loop"
    few = core.erase is Erase.NONE and scan_bytes(core, T) <= SCAN_HEAD_BYTES
    return "scan" if few else "loop"


def scan_bytes(core: Inputs, T: int) -> int:
    """Bytes of a table of decays of T tokens of one head."""
    return 4 * PAIR_TOKENS * T * max(core.k.shape[-1], core.v.shape[-1])


def in_chunks(plan: Plan) -> Plan:
    """The plan of a call with backend="chunks": the chunk form for any number of tokens."""
    return plan if plan.chunk_size is not None else plan._replace(chunk_size=default_array_chunk(plan))


def is_parallel(plan: Plan, T: int) -> bool:
    """Whether array calls use the parallel form: requested, or a chunk above ARRAY_CHUNK that holds all T tokens."""
    C: Any = plan.chunk_size
    return C == "parallel" or (isinstance(C, int) and C > ARRAY_CHUNK and C >= T)


def polynomial_chunk(plan: Plan, T: int, features: int, K: int, V: int, queries: int | None = None) -> tuple[int, bool]:
    """(tokens of a tile, whether T tokens see each other without features, tile by tile) of a polynomial of q . k.

    queries: their number, None for none. A pair of tokens takes K + V products, features M V for a token that is
    written or read; the choice depends on the lengths of the sequence.
    """
    queries = T if plan.causal or queries is None else queries
    pairs = T * queries / (2 if plan.causal else 1)
    is_cheaper = features * V * (T + queries) >= pairs * (K + V) and T <= LONGEST_DIRECT
    is_direct = is_parallel(plan, T) or (plan.chunk_size is None and is_cheaper)
    return (POLYNOMIAL_TILE, True) if is_direct else (array_chunk(plan, T), False)


def is_short(plan: Plan, T: int) -> bool:
    """Whether array calls use the recurrent form for T tokens by default."""
    return plan.chunk_size is None and T <= SHORT_ARRAY


def is_short_cuda(plan: Plan) -> bool:
    """Whether the CUDA kernels use the recurrent form: chunk_size=1, or by default for few tokens."""
    if plan.chunk_size is None:
        return max((s.stop - s.start for s in plan.sequences), default=0) <= SHORT_CUDA
    return plan.chunk_size == 1


def recurs_cuda(x: Inputs, plan: Plan) -> bool:
    """Whether a CUDA kernel goes token by token through a call of any length that no kernel of chunks covers.

    Array calls in chunks take 230 ns a token and head and more, the recurrence 5 to 50 (H200, 2026-11-23). Rows of 16
    bits at any length.
    """
    if plan.chunk_size is not None:
        return False
    rows = (y for n, y in (("q", x.q), ("v", x.v)) if y is not None and n not in plan.computed)
    longest = max((s.stop - s.start for s in plan.sequences), default=0)
    return longest <= FLOAT32_RECURRENCE or all(y.dtype.itemsize == 2 for y in rows)


def saves_factors(size: int) -> bool:
    """Whether the forward on CUDA stores `size` bytes of factors; else its backward recomputes them."""
    return size <= config.cuda_saved_mib << 20
