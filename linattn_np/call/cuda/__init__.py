"""Calls on CuPy arrays."""
