"""Vector decays in chunks of 16 tokens by mma.sync, for every dtype and device, as CUDA kernels on CuPy arrays."""

from .calls import backward, backward_unsupported_reason, forward, gives_states, how, unsupported_reason
from .plan import CHUNK

__all__ = [
    "CHUNK", "backward", "backward_unsupported_reason", "forward", "gives_states", "how", "unsupported_reason",
]  # fmt: skip
