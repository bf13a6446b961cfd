"""Kernels of the softmax core for CuPy arrays: imported where they are used."""
