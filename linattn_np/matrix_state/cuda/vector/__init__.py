"""A decay a token and channel, without erase or with the delta rule; capability 90."""
