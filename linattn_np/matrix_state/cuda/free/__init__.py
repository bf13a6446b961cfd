"""Erase FREE with a decay of the key channels, or none (rwkv7, dplr, iplr), as CUDA kernels on CuPy arrays."""

from .calls import forward, gives_states, how, unsupported_reason
from .gradients import backward

__all__ = ["backward", "forward", "gives_states", "how", "unsupported_reason"]
