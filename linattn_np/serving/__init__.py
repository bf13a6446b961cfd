"""States for servers: prefix caches, logs of tokens, small numbers."""
