# Written by `python docs/make_lists.py`.
# ruff: noqa: E501

from typing import Any, Literal, TypeVar, overload

from .. import Result

COMMON: dict[str, Any]
A = TypeVar("A")

def gated_norm(x: A, gate: Any, weight: Any = ..., *, eps: float = ..., activation: str = ..., gate_first: bool = ..., group: int | None = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """rms_norm and an output gate, in one pass."""
    ...

def gelu(x: A, *, approximate: str = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """x times the probability that a normal variable is below x."""
    ...

def group_norm(x: A, weight: Any = ..., bias: Any = ..., *, groups: int, eps: float = ..., centred: bool = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """layer_norm of each of `groups` equal parts of a row."""
    ...

def l2_norm(x: A, *, eps: float = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows divided by their length."""
    ...

def layer_norm(x: A, weight: Any = ..., bias: Any = ..., *, eps: float = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows with mean 0 and variance 1."""
    ...

def log_sigmoid(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The logarithm of the sigmoid: a log decay in [-inf, 0]."""
    ...

def rms_norm(x: A, weight: Any = ..., bias: Any = ..., *, eps: float = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows divided by the root of their mean square."""
    ...

@overload
def short_conv(x: A, weight: Any, bias: Any = ..., *, state: Any = ..., activation: str | None = ..., residual: bool = ..., cu_seqlens: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[False] = ..., overwrite_state: bool = ..., state_rows: Any = ...) -> A:
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers."""
    ...
@overload
def short_conv(x: A, weight: Any, bias: Any = ..., *, state: Any = ..., activation: str | None = ..., residual: bool = ..., cu_seqlens: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[True], overwrite_state: bool = ..., state_rows: Any = ...) -> Result[A]:
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers."""
    ...

def sigmoid(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The logistic function."""
    ...

def silu(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """x times its sigmoid, also called swish."""
    ...

def softmax(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Shares of a row that add up to 1."""
    ...

def softplus(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """A smooth maximum of x and 0."""
    ...

def squared_relu(x: A, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The square of the positive part."""
    ...

def swiglu(x: A, gate: Any, *, backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Values times the silu of their gates, the hidden layer of most MLPs today."""
    ...

@overload
def token_shift(x: A, mix: Any = ..., *, state: Any = ..., cu_seqlens: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[False] = ..., overwrite_state: bool = ..., state_rows: Any = ...) -> A:
    """The token before, or a mixture with it, as in RWKV."""
    ...
@overload
def token_shift(x: A, mix: Any = ..., *, state: Any = ..., cu_seqlens: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[True], overwrite_state: bool = ..., state_rows: Any = ...) -> Result[A]:
    """The token before, or a mixture with it, as in RWKV."""
    ...
