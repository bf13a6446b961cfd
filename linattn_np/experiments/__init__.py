"""Experiments on storage and retrieval: recall, on real text; probe, by exact constructions."""
