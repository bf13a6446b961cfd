"""The softmax core: attention over all tokens, whose state is a cache of keys and values."""
