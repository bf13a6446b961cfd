"""The matrix-state core as CUDA kernels on CuPy arrays: plans, arguments, launches."""
