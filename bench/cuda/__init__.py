"""Measurements on a CUDA device, through CuPy."""
