"""Tensors on a CUDA device."""
