"""The matrix-state core: a state S (K, V) decays, is erased, is written to, is read."""
