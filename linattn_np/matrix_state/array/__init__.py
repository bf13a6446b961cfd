"""The matrix-state core in array-API calls: decay, erase, one chunk, and three ways to bring the state to a chunk."""
