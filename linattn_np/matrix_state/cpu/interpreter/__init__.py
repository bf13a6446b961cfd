"""Programs of a chunk: operations on small matrices, written down in Python, carried out by one compiled loop."""
