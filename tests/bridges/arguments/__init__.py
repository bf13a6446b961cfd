"""Wrong and random arguments of every bridge."""
