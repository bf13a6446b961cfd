"""The matrix-state core in compiled loops on NumPy arrays."""
