"""Array libraries, shapes, threads, machine code and its caches. Knows nothing of attention."""
