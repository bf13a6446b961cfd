"""Associative memories with gates by token class, and the gradients of the gate logits.

    S_t = (I - b k k^T) e^g S_{t-1} + w k v^T,   o_t = S_t^T q_t

All memories receive the same keys and values and differ in g, b and w; mlstm and mesa_net also in the read-out. Arrays
have one head: q, k (B, T, 1, K), v (B, T, 1, V); `classes` (B, T) indexes the logits of a gate. A function of several
heads has outputs (B, T, H, V), and their sum over the heads is the output of the memory.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

import linattn_np as la
from linattn_np.spec import VariantSpec

from .text import CLASSES

Logits = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), without overflow; its derivative is the sigmoid."""
    return np.logaddexp(0, x)


def sum_by_class(x: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Sums of x, (B, T) or (B, T, K), over the tokens of each class: (5,) or (5, K)."""
    of_class = (classes.reshape(1, -1) == np.arange(len(CLASSES))[:, None]).astype(x.dtype)
    return of_class @ x.reshape(classes.size, *x.shape[2:])


class Memory:
    """Linear attention, which adds every pair with weight 1; subclasses change the function and the gates."""

    name: str = "linear"
    differs: str = ""  # from the function
    function: Callable[..., Any] = staticmethod(la.linear_attention)
    options: Mapping[str, Any] = MappingProxyType({})
    learning: Mapping[str, Any] = MappingProxyType({})  # options of `function` while its gates are learned
    start: ClassVar[dict[str, list[float]]] = {}  # initial logits; empty where nothing is learned

    @property
    def title(self) -> str:
        """The title of the function, and how the memory differs from it: "Delta rule of one strength"."""
        spec: VariantSpec = self.function.spec  # type: ignore[attr-defined]
        return " ".join(filter(None, [spec.title, self.differs]))

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        """The positional arrays of `function`."""
        return q, k, v

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        """Gradients of the logits from the gradients of the arrays."""
        return {}

    def run(
        self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any, state: Any = None, backend: str | None = None
    ) -> tuple[Any, np.ndarray]:
        """Outputs (B, T, 1, V), or None for q=None, and the state (B, 1, K, V) after the last token."""
        arrays = self.arrays(logits, classes, q, k, v)
        options = {"scale": 1, **self.options}
        out, state = self.function(*arrays, **options, state=state, return_state=True, backend=backend)
        return None if out is None else out.sum(2, keepdims=True), state

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        """The matrix of a state, (B, 1, K, V)."""
        return state


class Mlstm(Memory):
    """mLSTM with open gates: the linear memory, each output divided by its normaliser."""

    name = "mlstm"
    function = staticmethod(la.mlstm)

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        one = np.ones((*v.shape[:2], 1), v.dtype)
        return q, k, v, 0 * one, 40 * one

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        return np.exp(state.m)[..., None, None] * state.S


class WriteGate(Memory):
    """Linear attention that writes w v, w = sigmoid(write[class])."""

    name = "write_gate"
    differs = "with a write gate"
    start: ClassVar = {"write": [-1.0] * len(CLASSES)}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, gate(logits["write"], classes, v)[..., None] * v

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        return {"write": gate_vjp(logits["write"], classes, (grads.v * v).sum(-1))}


class FourHeads(Memory):
    """Four heads of K / 4 channels with a constant decay each; the output is their sum.

    The heads share the value, so that the state (B, 4, K / 4, V) has K V entries like that of the other memories.
    """

    def decays(self, logits: Logits) -> np.ndarray:
        """The last array of `function`, (4,)."""
        raise NotImplementedError

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        decays = self.decays(logits).astype(v.dtype)
        quarters = (*k.shape[:2], len(decays), k.shape[-1] // len(decays))
        heads = (*v.shape[:2], len(decays), v.shape[-1])
        return None if q is None else q.reshape(quarters), k.reshape(quarters), np.broadcast_to(v, heads), decays


class Retention(FourHeads):
    """Retention: g = -softplus(head_decay) of a head; at the start RetNet's decays, 1 - 2^-5 .. 1 - 2^-8."""

    name = "retention"
    function: Callable[..., Any] = staticmethod(la.retention)
    start: ClassVar = {"head_decay": [-float(np.log(2.0**n - 1)) for n in range(5, 9)]}

    def decays(self, logits: Logits) -> np.ndarray:
        return -softplus(logits["head_decay"])

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        return {"head_decay": -grads.g * sigmoid(logits["head_decay"])}


class Mamba2(Memory):
    """Mamba-2, one step size for write and decay: w = dt, g = A dt, dt = softplus(dt[class]), A = -exp(log_A)."""

    name = "mamba2"
    function = staticmethod(la.mamba2)
    start: ClassVar = {"dt": [-1.0] * len(CLASSES), "log_A": [-3.0]}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        dt = softplus(logits["dt"]).astype(v.dtype)[classes]
        return v, dt[..., None], -np.exp(logits["log_A"]).astype(v.dtype), k, q

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        by_class = sum_by_class(grads.dt[..., 0], classes)
        return {"dt": by_class * sigmoid(logits["dt"]), "log_A": -grads.A * np.exp(logits["log_A"])}


class Delta(Memory):
    """The delta rule, w = b = beta = sigmoid(write[class])."""

    name = "delta"
    function: Callable[..., Any] = staticmethod(la.delta_rule)
    start: ClassVar = {"write": [-1.0] * len(CLASSES)}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return q, k, v, gate(logits["write"], classes, v)

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        return {"write": gate_vjp(logits["write"], classes, grads.beta[..., 0])}


class DeltaOne(Delta):
    """The delta rule with the same beta for all classes."""

    name = "delta_one"
    differs = "of one strength"
    start: ClassVar = {"write": [-1.0]}


class GatedDelta(Delta):
    """The delta rule with a decay: g = -softplus(decay[class])."""

    name = "gated_delta"
    function: Callable[..., Any] = staticmethod(la.gated_delta_rule)
    start: ClassVar = {**Delta.start, "decay": [-6.0] * len(CLASSES)}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        g = -softplus(logits["decay"]).astype(v.dtype)[classes]
        return q, k, v, g[..., None], gate(logits["write"], classes, v)

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        by_class = sum_by_class(grads.g[..., 0], classes)
        return super().pullback(logits, classes, v, grads) | {"decay": -by_class * sigmoid(logits["decay"])}


class Mesa(GatedDelta):
    """MesaNet: the gates of gated_delta, and a ridge = softplus(ridge) of all channels, 1 at the start."""

    name = "mesa_net"
    function: Callable[..., Any] = staticmethod(la.mesa_net)
    learning = MappingProxyType({"solver": "conjugate_gradients", "iterations": 60, "tolerance": 1e-4})
    start: ClassVar = {**GatedDelta.start, "ridge": [float(np.log(np.expm1(1)))]}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return *super().arrays(logits, classes, q, k, v), self.ridge(logits, k)

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        ridge = {"ridge": grads.ridge.sum(keepdims=True)[0] * sigmoid(logits["ridge"])}
        return super().pullback(logits, classes, v, grads) | ridge

    def matrix(self, logits: Logits, state: Any) -> np.ndarray:
        return np.linalg.solve(state.Z + np.diag(self.ridge(logits, state.Z)[0]), state.S)

    @staticmethod
    def ridge(logits: Logits, k: np.ndarray) -> np.ndarray:
        """(1, K) in the dtype of k."""
        return np.broadcast_to(softplus(logits["ridge"]).astype(k.dtype), (1, k.shape[-1]))


class Kda(Delta):
    """The delta rule with a decay per channel: g = -softplus(decay[class] + spread ramp), ramp from -1 to 1 over K."""

    name = "kda"
    function = staticmethod(la.kda)
    start: ClassVar = {**GatedDelta.start, "spread": [1.0]}

    def arrays(self, logits: Logits, classes: np.ndarray, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        g = -softplus(self.decay_logits(logits, k.shape[-1])).astype(v.dtype)[classes]
        return q, k, v, g[:, :, None], gate(logits["write"], classes, v)

    def pullback(self, logits: Logits, classes: np.ndarray, v: Any, grads: Any) -> Logits:
        K = grads.g.shape[-1]
        by_class = -sum_by_class(grads.g[:, :, 0], classes) * sigmoid(self.decay_logits(logits, K))  # (5, K)
        decay = {"decay": by_class.sum(-1), "spread": np.array([(by_class * ramp(K)).sum()])}
        return super().pullback(logits, classes, v, grads) | decay

    @staticmethod
    def decay_logits(logits: Logits, K: int) -> np.ndarray:
        """decay[class] + spread ramp: (5, K)."""
        return logits["decay"][:, None] + logits["spread"] * ramp(K)


def ramp(K: int) -> np.ndarray:
    """-1 to 1 over the K channels."""
    return np.linspace(-1, 1, K)


def gate(write: np.ndarray, classes: np.ndarray, like: np.ndarray) -> np.ndarray:
    """sigmoid(write) of each token (B, T, 1), in the dtype of `like`; a single logit applies to all classes."""
    table = np.broadcast_to(sigmoid(write), (len(CLASSES),)).astype(like.dtype)
    return table[classes][..., None]


def gate_vjp(write: np.ndarray, classes: np.ndarray, dgate: np.ndarray) -> np.ndarray:
    """Gradient of `write` from the gradient of the gate, (B, T) or (B, T, 1)."""
    by_class = sum_by_class(dgate.reshape(classes.shape), classes)
    w = sigmoid(write)
    return (by_class if len(w) > 1 else by_class.sum(keepdims=True)) * w * (1 - w)


def softmax_outputs(q: np.ndarray, k: np.ndarray, v: np.ndarray, sharpness: float = 32.0) -> np.ndarray:
    """Causal softmax attention, softmax(32 q.k): outputs (B, n, V) of the last n queries over T keys."""
    return la.softmax_attention(*(x[:, :, None] for x in (q, k, v)), scale=sharpness)[:, :, 0]


KINDS = (Memory, Mlstm, WriteGate, Retention, Mamba2, DeltaOne, Delta, GatedDelta, Kda, Mesa)
RECURRENT = {kind.name: kind() for kind in KINDS}
LEARNED = tuple(name for name, memory in RECURRENT.items() if memory.start)
SOFTMAX = "softmax"
MEMORIES = (*RECURRENT, SOFTMAX)
