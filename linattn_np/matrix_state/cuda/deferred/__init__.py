"""Kernels on deferred arrays."""
