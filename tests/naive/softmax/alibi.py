import numpy as np

from .softmax_attention import attend


def alibi(q, k, v, slopes, scale=None, state=None, window=None, normalize=True):
    """p_tj ~ e^{scale q_t . k_j - slope (t - j)}; out_t = sum_j p_tj v_j."""
    g = np.broadcast_to(-slopes, (*v.shape[:2], len(slopes)))
    return attend(q, k, v, g, state, scale, window, normalize)
