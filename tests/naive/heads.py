"""The one index every loop shares: which head of a smaller group of heads belongs to a head."""


def head_of(head, heads, among):
    """Head `head` of `among` heads uses this one of `heads` heads (`heads` divides `among`)."""
    return head // (among // heads)
