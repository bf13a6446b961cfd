"""An example of a server: many requests decode together, each with the bits that it has alone."""
