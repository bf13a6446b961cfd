"""CUDA kernels of linear learners: with a layer norm (linear.py), the momentum delta rule (momentum.py)."""
