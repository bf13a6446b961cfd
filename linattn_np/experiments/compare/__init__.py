"""The comparison of mixers: small models trained on tasks with an answer, at several learning rates and seeds."""
