"""Pieces of compiled loops: small matrices, rows, elementary functions (docs/internals/cpu_kernels.md: an example)."""
