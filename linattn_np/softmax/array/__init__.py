"""The softmax core in array calls, tile by tile."""
