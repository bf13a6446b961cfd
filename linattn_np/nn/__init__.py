"""What a layer needs besides its operator: short convolutions, rotations, norms, activations, gates, losses.

    y = la.nn.rms_norm(x, weight)
    y, pullback = la.vjp(la.nn.rms_norm, x, weight)
    grads = pullback(dy)                          grads.x, grads.weight

Arrays of every library; the result has the dtype of the first array and is computed in float32, or float64 if an array
is. Options of all functions: backend ("reference": array calls, "numba": compiled loops; None chooses), num_threads,
and out, an array of the result's shape and dtype that the result is written to; it may be an input. la.explain says
how a call is computed, la.check what is doubtful about its numbers. On CuPy arrays they are CUDA kernels that read and
write the stored dtype.
"""

from .declaration import COMMON as COMMON
from .elementwise import gelu, log_sigmoid, sigmoid, silu, softplus, squared_relu, swiglu
from .ends import cross_entropy, dropout, embedding, linear
from .gates import log_decay
from .merging import merge as merge
from .mixing import short_conv, token_shift
from .positions import rotary, xpos
from .rows import gated_norm, group_norm, l2_norm, layer_norm, rms_norm, softmax

__all__ = ["cross_entropy", "dropout", "embedding", "gated_norm", "gelu", "group_norm", "l2_norm", "layer_norm",
           "linear", "log_decay", "log_sigmoid", "rms_norm", "rotary", "short_conv", "sigmoid", "silu", "softmax",
           "softplus", "squared_relu", "swiglu", "token_shift", "xpos"]  # fmt: skip
