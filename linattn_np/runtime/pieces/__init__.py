"""Functions that Numba compiles once each and that call one another by symbol; instructions of register tiles."""
