# Written by `python docs/make_lists.py`.
# ruff: noqa: E501

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

from . import distributed as distributed
from . import layers as layers
from . import nn as nn
from . import testing as testing
from . import train as train
from .call.check import check as check
from .call.explain import Explanation as Explanation
from .call.explain import explain as explain
from .call.influence import influence_matrix as influence_matrix
from .call.options import Options as Options
from .call.read import read as read
from .call.replay.plans import clear_cache as clear_cache
from .call.step import step as step
from .call.summary import compose as compose
from .call.summary import entry_states as entry_states
from .call.summary import summary as summary
from .catalog import family_table as family_table
from .composition import Summary as Summary
from .fast_weights.types import LinearMomentum as LinearMomentum
from .fast_weights.types import LinearState as LinearState
from .fast_weights.types import MLPMomentum as MLPMomentum
from .fast_weights.types import MLPState as MLPState
from .fast_weights.types import MomentumState as MomentumState
from .fast_weights.types import SwiGLUMomentum as SwiGLUMomentum
from .fast_weights.types import WindowState as WindowState
from .filters import affine_projection as affine_projection
from .filters import delay_line as delay_line
from .filters import lms as lms
from .filters import nlms as nlms
from .filters import rls as rls
from .filters import window_least_squares as window_least_squares
from .filters.arguments import Filtered as Filtered
from .filters.arguments import PastState as PastState
from .filters.arguments import ProjectionState as ProjectionState
from .filters.arguments import RLSState as RLSState
from .filters.associative import associative_scan as associative_scan
from .matrix_state.types import BoundedState as BoundedState
from .matrix_state.types import LevelState as LevelState
from .matrix_state.types import Mamba3State as Mamba3State
from .matrix_state.types import NormalisedState as NormalisedState
from .matrix_state.types import PreconditionedState as PreconditionedState
from .matrix_state.types import SlotState as SlotState
from .matrix_state.types import SolvedState as SolvedState
from .matrix_state.types import StabilisedState as StabilisedState
from .nn.merging import merge as merge
from .ops import feature_maps as feature_maps
from .runtime.config import config as config
from .runtime.versions import show_versions as show_versions
from .serving.log import StateLog as StateLog
from .serving.small import SmallState as SmallState
from .serving.small import pack_state as pack_state
from .serving.small import unpack_state as unpack_state
from .serving.store import StateStore as StateStore
from .softmax.types import GatedCache as GatedCache
from .softmax.types import HouseholderCache as HouseholderCache
from .softmax.types import KeyValueCache as KeyValueCache
from .spec import Samples as _Samples
from .spec import VariantFunction as _VariantFunction
from .spec import VariantSpec as VariantSpec

__version__: str
VARIANTS: tuple[_VariantFunction, ...]
SPECS: tuple[VariantSpec, ...]

A = TypeVar("A")

class Result(NamedTuple, Generic[A]):
    out: A
    state: Any

class StatesResult(NamedTuple, Generic[A]):
    out: A
    state: Any
    states: Any

class _AbcGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    s: Any
    state: Any

class _Abc:
    """Softmax over slots that hold weighted averages of keys and values. w_t = e^{s_t} / sum_{l <= t} e^{s_l};  W_t = W_{t-1} diag(1 - w_t) + k_t^T w_t;  S_t = diag(1 - w_t) S_{t-1} + w_t^T v_t;  out_t = softmax(scale q_t W_t) S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, s: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

abc: _Abc

class _AlibiGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    slopes: Any
    state: Any

class _Alibi:
    """Attention with linear biases (ALiBi): softmax attention that fades with the distance. p_tj ~ e^{scale q_t . k_j - slope (t - j)}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, slopes: Any, *, return_state: bool = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any, *, return_state: Literal[True], return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any, *, return_state: bool = ..., return_states_at: Any, window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any, *, return_state: bool, return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

alibi: _Alibi

class _AtlasGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    share: Any
    eta: Any
    mu: Any
    g: Any
    W1: Any
    W2: Any
    state: Any

class _Atlas:
    """A two-layer memory learns from a window of tokens, each step one of Muon. f_W(x) = gelu(x W1) W2;  S_t = mu_t S_{t-1} - eta_t d/dA sum_{t-c<i<=t} share_i |f_A(k_i) - v_i|^2;  W_t = e^{g_t} W_{t-1} + NS(S_t);  out_t = scale f_{W_t}(q_t), A: W when the mini-batch began"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., window: Any = ..., muon: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., window: Any = ..., muon: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., window: Any = ..., muon: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., window: Any = ..., muon: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, share: Any, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., window: Any = ..., muon: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

atlas: _Atlas

class _BasedGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    state: Any

class _Based:
    """Softmax attention's exponential by its Taylor polynomial. S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  phi(q) phi(k) = 1 + z + z^2 / 2, z = q k / sqrt(K)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, *, return_state: bool = ..., return_states_at: None = ..., order: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., order: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[True], return_states_at: None = ..., order: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool = ..., return_states_at: Any, order: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool, return_states_at: None = ..., order: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

based: _Based

class _BlockScanGradients(NamedTuple):
    a: Any
    x: Any
    state: Any

class _BlockScan:
    """The linear recurrence of short vectors, each multiplied by a matrix of the token. S_t = S_{t-1} a_t^T + x_t;  out_t = scale S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

block_scan: _BlockScan

class _CombaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    p: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _Comba:
    """A delta rule whose erase vector p differs from its key and reads the state before its decay. S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - p_t S_{t-1});  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, p: Any, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, p: Any, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, p: Any, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, p: Any, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, p: Any, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

comba: _Comba

class _DeltaProductGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    g: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _DeltaProduct:
    """Several steps of the delta rule per token; with a gate if one is given. S~ = e^{g_t} S_{t-1};  for each of n steps: S~ = S~ + k^T beta (v - k S~);  S_t = S~;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, beta: Any, g: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, g: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, g: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, g: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, g: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

delta_product: _DeltaProduct

class _DeltaRuleGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    state: Any

class _DeltaRule:
    """Erase what the key held, then write the new value. S_t = S_{t-1} + k_t^T beta_t (v_t - k_t S_{t-1});  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

delta_rule: _DeltaRule

class _DeltaformerGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    w: Any
    g: Any
    state: Any

class _Deltaformer:
    """DeltaFormer: softmax attention whose values are new to what the past predicts. u_t = v_t - beta_t sum_{j<t} p_tj u_j, p_tj ~ e^{scale w_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1;  out_t = sum_{j<=t} a_tj u_j, a_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j a_tj = 1"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, beta: Any, w: Any = ..., g: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, w: Any = ..., g: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, w: Any = ..., g: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, w: Any = ..., g: Any = ..., *, return_state: bool = ..., return_states_at: Any, normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, w: Any = ..., g: Any = ..., *, return_state: bool, return_states_at: None = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

deltaformer: _Deltaformer

class _DfwGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    gv: Any
    state: Any

class _Dfw:
    """One decay per key channel times one per value channel. S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, gv: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

dfw: _Dfw

class _DiagonalLonghornGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    state: Any

class _DiagonalLonghorn:
    """Longhorn as published: the implicit step of online regression, of which the diagonal is kept. h_t = (1 - b_t^T k_t^2) h_{t-1} + (b_t v_t)^T k_t, b_t = beta_t / (1 + beta_t k_t k_t^T);  out_t = scale q_t h_t^T"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

diagonal_longhorn: _DiagonalLonghorn

class _DplrGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    a: Any
    b: Any
    state: Any

class _Dplr:
    """Diagonal decay plus any rank-one map of the old state. S_t = diag(e^{g_t}) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

dplr: _Dplr

class _EflaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    state: Any

class _Efla:
    """The delta rule as the exact flow of its differential equation over one token. S_t = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = (1 - e^{-beta_t |k_t|^2}) / |k_t|^2;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

efla: _Efla

class _ForgettingAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    state: Any

class _ForgettingAttention:
    """Forgetting attention (FoX): softmax attention whose past fades. p_tj ~ e^{scale q_t . k_j + g_t + ... + g_{j+1}}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[True], return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: Any, window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool, return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

forgetting_attention: _ForgettingAttention

class _GatedDeltaRuleGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _GatedDeltaRule:
    """Decay the state, erase what the key held, write the new value. S~ = e^{g_t} S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

gated_delta_rule: _GatedDeltaRule

class _Gdn2Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    b: Any
    w: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _Gdn2:
    """A delta rule with a decay and an erase gate per key channel, and a write gate per value channel. S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + k_t^T (w_t * v_t - (b_t * k_t) S~);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, b: Any, w: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, b: Any, w: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, b: Any, w: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, b: Any, w: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, b: Any, w: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

gdn2: _Gdn2

class _GlaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    gv: Any
    state: Any

class _Gla:
    """Linear attention with one decay per token and key channel. S_t = diag(e^{g_t}) S_{t-1} diag(e^{gv_t}) + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, gv: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any = ..., *, return_state: bool = ..., return_states_at: Any, gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, gv: Any = ..., *, return_state: bool, return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

gla: _Gla

class _GsaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    s: Any
    g: Any
    state: Any

class _Gsa:
    """Softmax over slots, each of which decays and takes in keys and values. W_t = W_{t-1} diag(e^{g_t}) + k_t^T s_t;  S_t = diag(e^{g_t}) S_{t-1} + s_t^T v_t;  out_t = softmax(scale q_t W_t) S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, s: Any, g: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, g: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, g: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, g: Any = ..., *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, s: Any, g: Any = ..., *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

gsa: _Gsa

class _HgrnGradients(NamedTuple):
    x: Any
    g: Any
    state: Any

class _Hgrn:
    """A gated recurrence of channels that take in the share that they forget. h_t = e^{g_t} h_{t-1} + (1 - e^{g_t}) x_t;  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, g: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, g: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, g: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, g: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

hgrn: _Hgrn

class _Hgrn2Gradients(NamedTuple):
    q: Any
    v: Any
    g: Any
    state: Any

class _Hgrn2:
    """Vector decay; a channel writes with 1 - e^g, the share that it forgets. S_t = diag(e^{g_t}) S_{t-1} + (1 - e^{g_t})^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, v: A, g: Any, *, return_state: bool = ..., return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, v: A, g: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, v: A, g: Any, *, return_state: Literal[True], return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: Any, gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, v: A, g: Any, *, return_state: bool, return_states_at: None = ..., gate_lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

hgrn2: _Hgrn2

class _HouseholderPositionsGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    w: Any
    beta: Any
    state: Any

class _HouseholderPositions:
    """Softmax attention of queries and keys less their own delta-rule outputs, whose keys and values are w. P_t = (I - beta_t w_t^T w_t) P_{t-1};  p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, w: Any, beta: Any, *, return_state: bool = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, *, return_state: Literal[True], return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, *, return_state: bool = ..., return_states_at: Any, window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, *, return_state: bool, return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

householder_positions: _HouseholderPositions

class _IplrGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    state: Any

class _Iplr:
    """Any rank-one map of the old state, without a decay. S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, a: Any, b: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, a: Any, b: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, a: Any, b: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, a: Any, b: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, a: Any, b: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

iplr: _Iplr

class _KdaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _Kda:
    """The gated delta rule with one decay per key channel. S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., qk_l2norm: bool = ..., l2norm_eps: Any = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

kda: _Kda

class _LactGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    eta_A: Any
    eta_B: Any
    eta_W: Any
    mu: Any
    A: Any
    B: Any
    W: Any
    state: Any

class _Lact:
    """A SwiGLU learns from large chunks, each one step of Muon. f(x) = (silu(x A) * (x B)) W;  P' = (mean mu) P - sum_t eta_t d/d(A,B,W) -<f(k_t), v_t> over a chunk;  (A, B, W)' = columns of (A, B, W) + NS(P') with their first lengths;  out_t = scale f(q_t), before the step of its chunk"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., muon: Any = ..., stacked: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., muon: Any = ..., stacked: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., muon: Any = ..., stacked: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., muon: Any = ..., stacked: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta_A: Any, eta_B: Any, eta_W: Any, mu: Any, A: Any, B: Any, W: Any, *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., muon: Any = ..., stacked: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

lact: _Lact

class _LightningAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    slopes: Any
    state: Any

class _LightningAttention:
    """Linear attention with one published slope per head. S_t = e^{-slope} S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, slopes: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., layer: Any = ..., num_layers: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., layer: Any = ..., num_layers: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., layer: Any = ..., num_layers: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any = ..., *, return_state: bool = ..., return_states_at: Any, layer: Any = ..., num_layers: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, slopes: Any = ..., *, return_state: bool, return_states_at: None = ..., layer: Any = ..., num_layers: Any = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

lightning_attention: _LightningAttention

class _LinearAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    state: Any

class _LinearAttention:
    """Softmax attention's similarity replaced by an inner product of feature maps. S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = scale phi(q_t) S_t, over phi(q_t) z_t if normalised"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, *, return_state: bool = ..., return_states_at: None = ..., feature_map: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., feature_map: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[True], return_states_at: None = ..., feature_map: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool = ..., return_states_at: Any, feature_map: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool, return_states_at: None = ..., feature_map: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

linear_attention: _LinearAttention

class _LogLinearGatedDeltaRuleGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    lam: Any
    state: Any

class _LogLinearGatedDeltaRule:
    """The gated delta rule whose query weighs the past by levels of distance. S~ = e^{g_t} S_{t-1};  S_t = S~ + k_t^T beta_t (v_t - k_t S~), kept by levels l = bit_length(t xor j) of the token j;  out_t = scale sum_l lam_t[l] q_t S_t[l]"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, lam: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, lam: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, lam: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, lam: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, lam: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

log_linear_gated_delta_rule: _LogLinearGatedDeltaRule

class _LogLinearGlaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    lam: Any
    state: Any

class _LogLinearGla:
    """Simple gated linear attention whose query weighs the past by levels of distance. S_t = e^{g_t} S_{t-1} + k_t^T v_t, kept by levels l = bit_length(t xor j) of the token j;  out_t = scale sum_l lam_t[l] q_t S_t[l]"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, lam: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, lam: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, lam: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, lam: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, lam: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

log_linear_gla: _LogLinearGla

class _LonghornGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    beta: Any
    state: Any

class _Longhorn:
    """The delta rule with the step of an implicit update. S_t = S_{t-1} + k_t^T b_t (v_t - k_t S_{t-1}), b_t = beta_t / (1 + beta_t k_t k_t^T);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, beta: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

longhorn: _Longhorn

class _LruGradients(NamedTuple):
    x: Any
    nu_log: Any
    theta_log: Any
    gamma_log: Any
    state: Any

class _Lru:
    """A linear recurrent unit: constant complex eigenvalues inside the unit circle. h_t = l h_{t-1} + exp(gamma_log) x_t, l = exp(-exp(nu_log) + i exp(theta_log));  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, nu_log: Any, theta_log: Any, gamma_log: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, nu_log: Any, theta_log: Any, gamma_log: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, nu_log: Any, theta_log: Any, gamma_log: Any = ..., *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, nu_log: Any, theta_log: Any, gamma_log: Any = ..., *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

lru: _Lru

class _Mamba2Gradients(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    dt_bias: Any
    state: Any

class _Mamba2:
    """State space dual form: a scalar decay and a value scale driven by one step size. S_t = e^{dt_t A} S_{t-1} + B_t^T (dt_t x_t);  out_t = (C_t S_t + D x_t) silu(z_t)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: None, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

mamba2: _Mamba2

class _Mamba3Gradients(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    trap: Any
    angle: Any
    D: Any
    z: Any
    dt_bias: Any
    state: Any

class _Mamba3:
    """Channel pairs rotate under a scalar decay; a token also writes the one before (trapezoidal rule). S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t B_{t-1}^T x_{t-1}) + lambda_t dt_t B_t^T x_t;  out_t = (C_t S_t + D x_t) silu(z_t)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: None, trap: Any, angle: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

mamba3: _Mamba3

class _Mamba3MimoGradients(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    trap: Any
    angle: Any
    mimo_x: Any
    mimo_o: Any
    D: Any
    z: Any
    mimo_z: Any
    dt_bias: Any
    state: Any

class _Mamba3Mimo:
    """Mamba-3 with several inputs and outputs: a token writes and reads R rows of one state. W_t = sum_r B_tr^T x_tr, x_tr = mimo_x_r * x_t;  S_t = e^{dt_t A_t} R_t (S_{t-1} + (1 - lambda_t) dt_t W_{t-1}) + lambda_t dt_t W_t;  out_t = sum_r mimo_o_r * (C_tr S_t + D x_tr) * silu(mimo_z_r * z_t)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: None, trap: Any, angle: Any, mimo_x: Any, mimo_o: Any, D: Any = ..., z: Any = ..., mimo_z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, mimo_x: Any, mimo_o: Any, D: Any = ..., z: Any = ..., mimo_z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, mimo_x: Any, mimo_o: Any, D: Any = ..., z: Any = ..., mimo_z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, mimo_x: Any, mimo_o: Any, D: Any = ..., z: Any = ..., mimo_z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, trap: Any, angle: Any, mimo_x: Any, mimo_o: Any, D: Any = ..., z: Any = ..., mimo_z: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

mamba3_mimo: _Mamba3Mimo

class _MatrixGateGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    state: Any

class _MatrixGate:
    """Linear attention whose state decays entry by entry: the gate of a token is a matrix. S_t = e^{g_t} * S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

matrix_gate: _MatrixGate

class _MesaNetGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    ridge: Any
    state: Any

class _MesaNet:
    """Every query reads the regularised least-squares fit of what was written. Z_t = e^{g_t} Z_{t-1} + beta_t k_t^T k_t;  S_t = e^{g_t} S_{t-1} + beta_t k_t^T v_t;  out_t = scale q_t (Z_t + diag(ridge))^{-1} S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, ridge: Any, *, return_state: bool = ..., return_states_at: None = ..., solver: Any = ..., iterations: Any = ..., tolerance: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, ridge: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., solver: Any = ..., iterations: Any = ..., tolerance: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, ridge: Any, *, return_state: Literal[True], return_states_at: None = ..., solver: Any = ..., iterations: Any = ..., tolerance: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, ridge: Any, *, return_state: bool = ..., return_states_at: Any, solver: Any = ..., iterations: Any = ..., tolerance: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, ridge: Any, *, return_state: bool, return_states_at: None = ..., solver: Any = ..., iterations: Any = ..., tolerance: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

mesa_net: _MesaNet

class _MinGruGradients(NamedTuple):
    x: Any
    z: Any
    state: Any

class _MinGru:
    """A GRU whose update gate does not read the state. h_t = (1 - s_t) h_{t-1} + s_t x_t, s_t = sigmoid(z_t);  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, z: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, z: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, z: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, z: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

min_gru: _MinGru

class _MinLstmGradients(NamedTuple):
    x: Any
    f: Any
    i: Any
    state: Any

class _MinLstm:
    """An LSTM whose gates do not read the state, and sum to 1. h_t = (f'_t h_{t-1} + i'_t x_t) / (f'_t + i'_t), f'_t = sigmoid(f_t), i'_t = sigmoid(i_t);  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, f: Any, i: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, f: Any, i: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, f: Any, i: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, f: Any, i: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

min_lstm: _MinLstm

class _MlstmGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    i: Any
    f: Any
    state: Any

class _Mlstm:
    """Scalar decay with an exponential input gate, read through a normaliser that is at least 1. S_t = f_t S_{t-1} + e^{i_t} k_t^T v_t;  n_t = f_t n_{t-1} + e^{i_t} k_t;  out_t = scale q_t S_t / max(|scale q_t n_t^T|, 1)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, i: Any, f: Any, *, return_state: bool = ..., return_states_at: None = ..., soft_cap: Any = ..., forget_gate: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, i: Any, f: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., soft_cap: Any = ..., forget_gate: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, i: Any, f: Any, *, return_state: Literal[True], return_states_at: None = ..., soft_cap: Any = ..., forget_gate: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, i: Any, f: Any, *, return_state: bool = ..., return_states_at: Any, soft_cap: Any = ..., forget_gate: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, i: Any, f: Any, *, return_state: bool, return_states_at: None = ..., soft_cap: Any = ..., forget_gate: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

mlstm: _Mlstm

class _MomentumDeltaRuleGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    mu: Any
    eta: Any
    state: Any

class _MomentumDeltaRule:
    """The corrections of a gated delta rule have momentum. M_t = mu_t M_{t-1} + eta_t k_t^T (v_t - p_t S_{t-1}), p_t = e^{g_t} k_t or k_t;  S_t = e^{g_t} S_{t-1} + beta_t M_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, mu: Any, eta: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., predict: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, mu: Any, eta: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., predict: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, mu: Any, eta: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., predict: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, mu: Any, eta: Any = ..., *, return_state: bool = ..., return_states_at: Any, predict: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, mu: Any, eta: Any = ..., *, return_state: bool, return_states_at: None = ..., predict: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

momentum_delta_rule: _MomentumDeltaRule

class _PathAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    w: Any
    beta: Any
    g: Any
    state: Any

class _PathAttention:
    """PaTH attention: softmax attention whose logits pass the Householder-like maps of the tokens between. H_t = I - beta_t w_t^T w_t;  p_tj ~ e^{scale q_t H_t ... H_{j+1} k_j^T + g_t + ... + g_{j+1}}, sum_j p_tj = 1;  out_t = sum_j p_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, w: Any, beta: Any, g: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, g: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, g: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, g: Any = ..., *, return_state: bool = ..., return_states_at: Any, window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, w: Any, beta: Any, g: Any = ..., *, return_state: bool, return_states_at: None = ..., window: Any = ..., normalize: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

path_attention: _PathAttention

class _PerformerGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    state: Any

class _Performer:
    """Softmax attention's exponential by positive orthogonal random features. S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  phi(x) = e^{w x - x^2 / 2} of random w"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, *, return_state: bool = ..., return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., hyperbolic: bool = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., hyperbolic: bool = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[True], return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., hyperbolic: bool = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool = ..., return_states_at: Any, num_features: Any = ..., seed: Any = ..., hyperbolic: bool = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool, return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., hyperbolic: bool = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

performer: _Performer

class _PreconditionedGatedDeltaRuleGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    g_square: Any
    beta_square: Any
    center: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _PreconditionedGatedDeltaRule:
    """The gated delta rule whose key writes behind a diagonal preconditioner. A_t = e^{g_square_t} A_{t-1} + beta_square_t k_t * k_t;  m_t = span^{-softsign(log(A_t + eps) - center)};  S~ = e^{g_t} S_{t-1};  S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

preconditioned_gated_delta_rule: _PreconditionedGatedDeltaRule

class _PreconditionedKdaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    g_square: Any
    beta_square: Any
    center: Any
    A_log: Any
    dt_bias: Any
    state: Any

class _PreconditionedKda:
    """Kimi delta attention whose key writes behind a diagonal preconditioner. A_t = e^{g_square_t} A_{t-1} + beta_square_t k_t * k_t;  m_t = span^{-softsign(log(A_t + eps) - center)};  S~ = diag(e^{g_t}) S_{t-1};  S_t = S~ + (m_t * k_t)^T beta_t (v_t - k_t S~);  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, beta: Any, g_square: Any, beta_square: Any, center: Any = ..., A_log: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., beta_sigmoid: bool = ..., allow_neg_eigval: bool = ..., lower_bound: Any = ..., span: Any = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

preconditioned_kda: _PreconditionedKda

class _RebasedGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    gamma: Any
    shift: Any
    state: Any

class _Rebased:
    """The square of an inner product of normed queries and keys. S_t = S_{t-1} + phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  phi(q) phi(k) = (q' k')^2 / K, x' = gamma norm(x) + shift"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, gamma: Any = ..., shift: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, gamma: Any = ..., shift: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, gamma: Any = ..., shift: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, gamma: Any = ..., shift: Any = ..., *, return_state: bool = ..., return_states_at: Any, normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, gamma: Any = ..., shift: Any = ..., *, return_state: bool, return_states_at: None = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rebased: _Rebased

class _RetentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    state: Any

class _Retention:
    """Linear attention with one fixed decay per head. S_t = diag(e^g) S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: bool = ..., return_states_at: Any, feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: bool, return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

retention: _Retention

class _RetnetGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    theta: Any
    state: Any

class _Retnet:
    """Retention whose queries and keys rotate with their position: a complex decay. S_t = e^g R S_{t-1} + k_t^T v_t, R rotates pairs of rows by theta;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any = ..., theta: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., xpos: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., theta: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., xpos: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., theta: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., xpos: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., theta: Any = ..., *, return_state: bool = ..., return_states_at: Any, xpos: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., theta: Any = ..., *, return_state: bool, return_states_at: None = ..., xpos: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

retnet: _Retnet

class _RfaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    state: Any

class _Rfa:
    """A Gaussian kernel of unit queries and keys by random Fourier features; with a gate if one is given. S_t = e^{g_t} S_{t-1} + (1 - e^{g_t}) phi(k_t)^T v_t;  out_t = phi(q_t) S_t / phi(q_t) z_t;  phi(x) = [sin, cos](w x)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., sigma: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., sigma: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., sigma: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: bool = ..., return_states_at: Any, num_features: Any = ..., seed: Any = ..., sigma: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any = ..., *, return_state: bool, return_states_at: None = ..., num_features: Any = ..., seed: Any = ..., sigma: Any = ..., normalize: bool = ..., causal: bool = ..., eps: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rfa: _Rfa

class _RgLruGradients(NamedTuple):
    x: Any
    r: Any
    i: Any
    Lambda: Any
    state: Any

class _RgLru:
    """A linear recurrent unit with a gated decay and inputs of one variance. h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t, log a_t = -8 softplus(Lambda) sigmoid(r_t);  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, r: Any, i: Any, Lambda: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, r: Any, i: Any, Lambda: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, r: Any, i: Any, Lambda: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, r: Any, i: Any, Lambda: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rg_lru: _RgLru

class _Rwkv4Gradients(NamedTuple):
    k: Any
    v: Any
    w: Any
    u: Any
    state: Any

class _Rwkv4:
    """An average of the past whose weights decay, and of the token itself with a bonus, in log space. S_t = e^{-w} S_{t-1} + e^{k_t} v_t;  n_t = e^{-w} n_{t-1} + e^{k_t};  out_t = (scale S_{t-1} + e^{u + k_t} v_t) / (scale n_{t-1} + e^{u + k_t})"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, k: Any, v: A, w: Any, u: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, k: Any, v: A, w: Any, u: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, k: Any, v: A, w: Any, u: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, k: Any, v: A, w: Any, u: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rwkv4: _Rwkv4

class _Rwkv6Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    u: Any
    state: Any

class _Rwkv6:
    """Vector decay, read before the write, with a bonus for the token itself. out_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t);  S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, u: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, u: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, u: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, u: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, u: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rwkv6: _Rwkv6

class _Rwkv7Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    a: Any
    b: Any
    state: Any

class _Rwkv7:
    """Diagonal decay, and a rank-one correction read from the old state. S_t = diag(e^{g_t}) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, a: Any, b: Any, *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

rwkv7: _Rwkv7

class _S4dGradients(NamedTuple):
    x: Any
    dt_log: Any
    A_log: Any
    A_imag: Any
    C: Any
    D: Any
    state: Any

class _S4d:
    """A diagonal state space of N complex states a channel, discretised by a zero-order hold. h_t = e^{dt A} h_{t-1} + (e^{dt A} - 1) / A x_t;  out_t = 2 Re(C h_t) + D x_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt_log: Any, A_log: Any, A_imag: Any, C: Any, D: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt_log: Any, A_log: Any, A_imag: Any, C: Any, D: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt_log: Any, A_log: Any, A_imag: Any, C: Any, D: Any = ..., *, return_state: bool = ..., return_states_at: Any, scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt_log: Any, A_log: Any, A_imag: Any, C: Any, D: Any = ..., *, return_state: bool, return_states_at: None = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

s4d: _S4d

class _ScanGradients(NamedTuple):
    a: Any
    x: Any
    state: Any

class _Scan:
    """The linear recurrence of every channel by itself, real or complex. h_t = a_t h_{t-1} + x_t;  out_t = scale h_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., log: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: Literal[True], return_states_at: None = ..., log: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: bool = ..., return_states_at: Any, log: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, a: Any, x: A, *, return_state: bool, return_states_at: None = ..., log: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

scan: _Scan

class _SelectiveScanGradients(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    dt_bias: Any
    state: Any

class _SelectiveScan:
    """Every channel has a state of N numbers, which decay and take in by step sizes of the token. h_t = e^{dt_t A} h_{t-1} + (dt_t x_t) B_t^T;  out_t = (h_t C_t + D x_t) silu(z_t)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., *, return_state: bool, return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

selective_scan: _SelectiveScan

class _SimpleGlaGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    g: Any
    state: Any

class _SimpleGla:
    """Linear attention with one decay per token and head; also gated retention. S_t = e^{g_t} S_{t-1} + k_t^T v_t;  out_t = scale q_t S_t"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: Literal[True], return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool = ..., return_states_at: Any, feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, g: Any, *, return_state: bool, return_states_at: None = ..., feature_map: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

simple_gla: _SimpleGla

class _SoftmaxAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    sinks: Any
    bias: Any
    state: Any

class _SoftmaxAttention:
    """Softmax attention: weighted averages of all values, or of those in a window. p_tj = e^{z_tj} / (e^{sink} + sum_i e^{z_ti}), z_tj = scale q_t . k_j + bias_tj;  out_t = sum_j p_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[False] = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[False] = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[False] = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: bool = ..., return_states_at: Any, window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[False] = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: bool, return_states_at: None = ..., window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[False] = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, sinks: Any = ..., bias: Any = ..., *, return_state: bool = ..., return_states_at: Any = ..., window: Any = ..., normalize: bool = ..., causal: bool = ..., return_lse: Literal[True], scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Any: ...

softmax_attention: _SoftmaxAttention

class _StickBreakingAttentionGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    state: Any

class _StickBreakingAttention:
    """Stick-breaking attention: a query takes shares of what nearer tokens left. s_tj = sigmoid(scale q_t . k_j);  a_tj = s_tj prod_{j<i<t} (1 - s_ti);  out_t = sum_{j<t} a_tj v_j"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, *, return_state: bool = ..., return_states_at: None = ..., attend_current: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[False] = ..., return_states_at: None = ..., attend_current: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: Literal[True], return_states_at: None = ..., attend_current: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool = ..., return_states_at: Any, attend_current: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, *, return_state: bool, return_states_at: None = ..., attend_current: bool = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

stick_breaking_attention: _StickBreakingAttention

class _TitansGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    eta: Any
    mu: Any
    g: Any
    W1: Any
    W2: Any
    state: Any

class _Titans:
    """A two-layer memory learns to map keys to values, by gradient descent with momentum and decay. f_W(x) = gelu(x W1) W2;  S_t = mu_t S_{t-1} - eta_t d/dA |f_A(k_t) - v_t|^2;  W_t = e^{g_t} W_{t-1} + S_t;  out_t = scale f_{W_t}(q_t), A: W when the mini-batch began"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W1: Any, W2: Any, *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

titans: _Titans

class _TitansLinearGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    eta: Any
    mu: Any
    g: Any
    W: Any
    state: Any

class _TitansLinear:
    """A matrix learns to map keys to values, by gradient descent with momentum and decay. f_W(x) = x W;  S_t = mu_t S_{t-1} - eta_t d/dA |f_A(k_t) - v_t|^2;  W_t = e^{g_t} W_{t-1} + S_t;  out_t = scale f_{W_t}(q_t), A: W when the mini-batch began"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, eta: Any, mu: Any, g: Any, W: Any, *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W: Any, *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W: Any, *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W: Any, *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, mu: Any, g: Any, W: Any, *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

titans_linear: _TitansLinear

class _TransxssmGradients(NamedTuple):
    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    dt_bias: Any
    theta: Any
    state: Any

class _Transxssm:
    """Mamba-2 whose input and output vectors rotate with their position. S_t = e^{dt_t A} R S_{t-1} + B_t^T (dt_t x_t), R rotates pairs of rows by theta;  out_t = (C_t S_t + D x_t) silu(z_t)"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: None, D: Any = ..., z: Any = ..., dt_bias: Any = ..., theta: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., theta: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., theta: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., theta: Any = ..., *, return_state: bool = ..., return_states_at: Any, dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, x: A, dt: Any, A: Any, B: Any, C: Any, D: Any = ..., z: Any = ..., dt_bias: Any = ..., theta: Any = ..., *, return_state: bool, return_states_at: None = ..., dt_softplus: bool = ..., dt_limit: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

transxssm: _Transxssm

class _TttLinearGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    eta: Any
    W: Any
    b: Any
    weight: Any
    shift: Any
    gain: Any
    state: Any

class _TttLinear:
    """A linear model with a layer norm learns to map keys to values, a mini-batch at a time. f_{W,b}(x) = x + LN(x W + b);  W_t, b_t = W_{t-1}, b_{t-1} - eta_t d/d(W,b) |f_A(k_t) - v_t|^2 / 2;  out_t = scale f_R(q_t), R = A + gain_t ((W_t, b_t) - A), A: (W, b) when the mini-batch began"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W: Any, b: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

ttt_linear: _TttLinear

class _TttMlpGradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    eta: Any
    W1: Any
    b1: Any
    W2: Any
    b2: Any
    weight: Any
    shift: Any
    gain: Any
    state: Any

class _TttMlp:
    """A two-layer model with a layer norm learns to map keys to values, a mini-batch at a time. f_W(x) = x + LN(gelu(x W1 + b1) W2 + b2);  W_t = W_{t-1} - eta_t d/dW |f_A(k_t) - v_t|^2 / 2;  out_t = scale f_R(q_t), R = A + gain_t (W_t - A), A: W when the mini-batch began"""

    __name__: str
    spec: VariantSpec
    samples: _Samples
    @overload
    def __call__(
        self, q: None, k: Any, v: A, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[None]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: Literal[False] = ..., return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: Literal[True], return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> Result[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool = ..., return_states_at: Any, mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> StatesResult[A]: ...
    @overload
    def __call__(
        self, q: Any, k: Any, v: A, eta: Any, W1: Any, b1: Any, W2: Any, b2: Any, weight: Any, shift: Any, gain: Any = ..., *, return_state: bool, return_states_at: None = ..., mini_batch: Any = ..., read: Any = ..., scale: float | None = ..., state: Any = ..., overwrite_state: bool = ..., state_rows: Any = ..., fresh: Any = ..., reverse: bool = ..., cu_seqlens: Any = ..., chunk_size: int | Literal["parallel"] | None = ..., chunk_states: Literal["loop", "scan"] | None = ..., precision: Literal["tf32"] | None = ..., num_threads: int | None = ..., layout: Literal["time_first", "heads_first"] = ..., backend: Literal["reference", "chunks", "numba", "cuda"] | None = ..., check: bool = ...
    ) -> A | Result[A]: ...

ttt_mlp: _TttMlp

@overload
def vjp(fn: _Abc, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _AbcGradients]]: ...
@overload
def vjp(fn: _Alibi, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _AlibiGradients]]: ...
@overload
def vjp(fn: _Atlas, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _AtlasGradients]]: ...
@overload
def vjp(fn: _Based, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _BasedGradients]]: ...
@overload
def vjp(fn: _BlockScan, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _BlockScanGradients]]: ...
@overload
def vjp(fn: _Comba, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _CombaGradients]]: ...
@overload
def vjp(fn: _DeltaProduct, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DeltaProductGradients]]: ...
@overload
def vjp(fn: _DeltaRule, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DeltaRuleGradients]]: ...
@overload
def vjp(fn: _Deltaformer, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DeltaformerGradients]]: ...
@overload
def vjp(fn: _Dfw, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DfwGradients]]: ...
@overload
def vjp(fn: _DiagonalLonghorn, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DiagonalLonghornGradients]]: ...
@overload
def vjp(fn: _Dplr, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _DplrGradients]]: ...
@overload
def vjp(fn: _Efla, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _EflaGradients]]: ...
@overload
def vjp(fn: _ForgettingAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _ForgettingAttentionGradients]]: ...
@overload
def vjp(fn: _GatedDeltaRule, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _GatedDeltaRuleGradients]]: ...
@overload
def vjp(fn: _Gdn2, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Gdn2Gradients]]: ...
@overload
def vjp(fn: _Gla, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _GlaGradients]]: ...
@overload
def vjp(fn: _Gsa, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _GsaGradients]]: ...
@overload
def vjp(fn: _Hgrn, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _HgrnGradients]]: ...
@overload
def vjp(fn: _Hgrn2, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Hgrn2Gradients]]: ...
@overload
def vjp(fn: _HouseholderPositions, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _HouseholderPositionsGradients]]: ...
@overload
def vjp(fn: _Iplr, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _IplrGradients]]: ...
@overload
def vjp(fn: _Kda, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _KdaGradients]]: ...
@overload
def vjp(fn: _Lact, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LactGradients]]: ...
@overload
def vjp(fn: _LightningAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LightningAttentionGradients]]: ...
@overload
def vjp(fn: _LinearAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LinearAttentionGradients]]: ...
@overload
def vjp(fn: _LogLinearGatedDeltaRule, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LogLinearGatedDeltaRuleGradients]]: ...
@overload
def vjp(fn: _LogLinearGla, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LogLinearGlaGradients]]: ...
@overload
def vjp(fn: _Longhorn, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LonghornGradients]]: ...
@overload
def vjp(fn: _Lru, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _LruGradients]]: ...
@overload
def vjp(fn: _Mamba2, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Mamba2Gradients]]: ...
@overload
def vjp(fn: _Mamba3, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Mamba3Gradients]]: ...
@overload
def vjp(fn: _Mamba3Mimo, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Mamba3MimoGradients]]: ...
@overload
def vjp(fn: _MatrixGate, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MatrixGateGradients]]: ...
@overload
def vjp(fn: _MesaNet, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MesaNetGradients]]: ...
@overload
def vjp(fn: _MinGru, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MinGruGradients]]: ...
@overload
def vjp(fn: _MinLstm, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MinLstmGradients]]: ...
@overload
def vjp(fn: _Mlstm, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MlstmGradients]]: ...
@overload
def vjp(fn: _MomentumDeltaRule, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _MomentumDeltaRuleGradients]]: ...
@overload
def vjp(fn: _PathAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _PathAttentionGradients]]: ...
@overload
def vjp(fn: _Performer, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _PerformerGradients]]: ...
@overload
def vjp(fn: _PreconditionedGatedDeltaRule, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _PreconditionedGatedDeltaRuleGradients]]: ...
@overload
def vjp(fn: _PreconditionedKda, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _PreconditionedKdaGradients]]: ...
@overload
def vjp(fn: _Rebased, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _RebasedGradients]]: ...
@overload
def vjp(fn: _Retention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _RetentionGradients]]: ...
@overload
def vjp(fn: _Retnet, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _RetnetGradients]]: ...
@overload
def vjp(fn: _Rfa, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _RfaGradients]]: ...
@overload
def vjp(fn: _RgLru, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _RgLruGradients]]: ...
@overload
def vjp(fn: _Rwkv4, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Rwkv4Gradients]]: ...
@overload
def vjp(fn: _Rwkv6, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Rwkv6Gradients]]: ...
@overload
def vjp(fn: _Rwkv7, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _Rwkv7Gradients]]: ...
@overload
def vjp(fn: _S4d, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _S4dGradients]]: ...
@overload
def vjp(fn: _Scan, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _ScanGradients]]: ...
@overload
def vjp(fn: _SelectiveScan, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _SelectiveScanGradients]]: ...
@overload
def vjp(fn: _SimpleGla, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _SimpleGlaGradients]]: ...
@overload
def vjp(fn: _SoftmaxAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _SoftmaxAttentionGradients]]: ...
@overload
def vjp(fn: _StickBreakingAttention, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _StickBreakingAttentionGradients]]: ...
@overload
def vjp(fn: _Titans, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _TitansGradients]]: ...
@overload
def vjp(fn: _TitansLinear, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _TitansLinearGradients]]: ...
@overload
def vjp(fn: _Transxssm, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _TransxssmGradients]]: ...
@overload
def vjp(fn: _TttLinear, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _TttLinearGradients]]: ...
@overload
def vjp(fn: _TttMlp, *arrays: Any, **options: Any) -> tuple[Any, Callable[..., _TttMlpGradients]]: ...
@overload
def vjp(fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Callable[..., Any]]: ...
