"""The systems of a SOLVED read-out by conjugate gradients, a chunk at a time: plans, launches."""
