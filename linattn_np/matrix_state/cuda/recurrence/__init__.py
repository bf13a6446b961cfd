"""Gradients token by token, as CUDA kernels on CuPy arrays: for calls that no kernel of chunks covers."""

from .gradients import backward, unsupported_reason

__all__ = ["backward", "unsupported_reason"]
