"""The elementwise core on CuPy arrays, in CUDA kernels."""
