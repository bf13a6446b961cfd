"""Computations on the elementwise core whose states are read by vectors."""
