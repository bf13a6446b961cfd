"""The elementwise core in compiled loops, on NumPy arrays."""
