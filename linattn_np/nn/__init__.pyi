# Written by `python docs/make_lists.py`.
# ruff: noqa: E501

from typing import Any, Literal, TypeVar, overload

from .. import Result

COMMON: dict[str, Any]
__all__: list[str]
A = TypeVar("A")

def cross_entropy(x: A, labels: Any, weight: Any = ..., bias: Any = ..., *, ignore_index: int = ..., label_smoothing: float = ..., z_loss: float = ..., reduction: str = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The negative log likelihood of labels, of logits or of the hidden states before the last dense layer."""
    ...

def dropout(x: A, *, rng: Any, p: float = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Elements set to 0 with probability p, the others divided by 1 - p."""
    ...

def embedding(ids: Any, weight: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows of a table."""
    ...

def gated_norm(x: A, gate: Any, weight: Any = ..., *, eps: float = ..., activation: str = ..., gate_first: bool = ..., group: int | None = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """rms_norm and an output gate, in one pass."""
    ...

def gelu(x: A, *, approximate: str = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """x times the probability that a normal variable is below x."""
    ...

def group_norm(x: A, weight: Any = ..., bias: Any = ..., *, groups: int, eps: float = ..., centred: bool = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """layer_norm of each of `groups` equal parts of a row."""
    ...

def l2_norm(x: A, *, eps: float = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows divided by their length."""
    ...

def layer_norm(x: A, weight: Any = ..., bias: Any = ..., *, eps: float = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows with mean 0 and variance 1."""
    ...

def linear(x: A, weight: Any, bias: Any = ..., *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """A dense layer."""
    ...

def log_decay(a: A, A_log: Any = ..., bias: Any = ..., *, formula: str = ..., bound: float = ..., divisor: float = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The log decay g <= 0 of a token from its projection a; b = a + bias, rate = e^{A_log}, or 1 without A_log."""
    ...

def log_sigmoid(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The logarithm of the sigmoid: a log decay in [-inf, 0]."""
    ...

def rms_norm(x: A, weight: Any = ..., bias: Any = ..., *, eps: float = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rows divided by the root of their mean square."""
    ...

def rotary(x: A, angle: Any = ..., *, base: float = ..., dims: int | None = ..., interleaved: bool = ..., offset: int = ..., cumulative: bool = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rotary position embedding: pairs of channels of queries and keys rotated by angles of the token."""
    ...

@overload
def short_conv(x: A, weight: Any, bias: Any = ..., *, state: Any = ..., activation: str | None = ..., residual: bool = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[False] = ..., overwrite_state: bool = ..., state_rows: Any = ...) -> A:
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers."""
    ...
@overload
def short_conv(x: A, weight: Any, bias: Any = ..., *, state: Any = ..., activation: str | None = ..., residual: bool = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[True], overwrite_state: bool = ..., state_rows: Any = ...) -> Result[A]:
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers."""
    ...
@overload
def short_conv(x: A, weight: Any, bias: Any = ..., *, state: Any = ..., activation: str | None = ..., residual: bool = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: bool, overwrite_state: bool = ..., state_rows: Any = ...) -> Any:
    """Causal convolution of each channel with its own W weights, before the queries, keys and values of most layers."""
    ...

def sigmoid(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The logistic function."""
    ...

def silu(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """x times its sigmoid, also called swish."""
    ...

def softmax(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Shares of a row that add up to 1."""
    ...

def softplus(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """A smooth maximum of x and 0."""
    ...

def squared_relu(x: A, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """The square of the positive part."""
    ...

def swiglu(x: A, gate: Any, *, out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Values times the silu of their gates, the hidden layer of most MLPs today."""
    ...

@overload
def token_shift(x: A, mix: Any = ..., *, state: Any = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[False] = ..., overwrite_state: bool = ..., state_rows: Any = ...) -> A:
    """The token before, or a mixture with it, as in RWKV."""
    ...
@overload
def token_shift(x: A, mix: Any = ..., *, state: Any = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: Literal[True], overwrite_state: bool = ..., state_rows: Any = ...) -> Result[A]:
    """The token before, or a mixture with it, as in RWKV."""
    ...
@overload
def token_shift(x: A, mix: Any = ..., *, state: Any = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ..., return_state: bool, overwrite_state: bool = ..., state_rows: Any = ...) -> Any:
    """The token before, or a mixture with it, as in RWKV."""
    ...

def xpos(x: A, *, inverse: bool = ..., base: float = ..., scale_base: float = ..., gamma: float = ..., dims: int | None = ..., interleaved: bool = ..., offset: int = ..., cu_seqlens: Any = ..., out: Any = ..., backend: str | None = ..., num_threads: int | None = ...) -> A:
    """Rotary embedding with a decay in the distance: queries grow with their position, keys shrink."""
    ...
