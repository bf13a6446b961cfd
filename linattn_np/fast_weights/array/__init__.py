"""Array calls of any library."""
