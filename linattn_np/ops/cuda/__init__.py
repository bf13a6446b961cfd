"""Small functions of ops/ as CUDA kernels on CuPy arrays."""
