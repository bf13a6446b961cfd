"""CUDA sources: reading, compiling, launching, recording."""
