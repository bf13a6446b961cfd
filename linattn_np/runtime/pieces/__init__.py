"""Functions that Numba compiles once each and that call one another by symbol; the instructions of register tiles."""
