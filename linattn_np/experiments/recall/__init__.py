"""`linattn recall`: needle-in-a-haystack retrieval from real text, without a trained model.

Tokens have fixed vectors (codes, text, needles, streams); only the gates of a memory are learned, by token class
(memories, fixed_memories, learn, loss, gates). evaluation scores the memories; scores, verdict, report and pictures
present the results.
"""
