"""Chunks by mma.sync, for every dtype and device: vector decays, and the delta rule."""
