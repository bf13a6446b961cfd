"""The softmax core in kernels that Numba compiles."""
