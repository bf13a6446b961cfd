"""CUDA kernels of linear learners."""
