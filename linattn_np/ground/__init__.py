"""Floor 0: array libraries, shapes, chunk tables, backend choice. Knows nothing of attention."""
