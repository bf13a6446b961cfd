"""Softmax attention, one pair of a query and a key after the other."""

import numpy as np


def ring(old, new, length, slots, empty=0.0):
    """`slots` slots (L, ...) after the rows `new`: token p in slot p mod L."""
    rows = {p: old[p % len(old)] for p in range(max(0, length - len(old)), length)}
    rows |= {length + t: x for t, x in enumerate(new)}
    shape = new.shape[1:]
    out = np.full((slots, *shape), empty)
    for p, x in rows.items():
        if p >= length + len(new) - slots:
            out[p % slots] = x
    return out


def attend(q, k, v, g, state, scale, window, normalize, sinks=None, causal=True):
    """(out, cache) on (B, T, H, D): out_t = sum_j p_tj v_j; g (B, T, Hq) or None."""
    (B, T, _, _), heads, scale = v.shape, max(q.shape[2], v.shape[2]), q.shape[-1] ** -0.5 if scale is None else scale
    gates = np.zeros((B, T, q.shape[2])) if g is None else g
    out, ends = np.zeros((*q.shape[:2], heads, v.shape[-1])), []
    for b in range(B):
        n = 0 if state is None else round(float(state[-1][b]))
        L = 0 if state is None else state[0].shape[1]
        old = range(max(0, n - L), n)
        keys = [state[0][b, p % L] for p in old] + list(k[b])
        values = [state[1][b, p % L] for p in old] + list(v[b])
        decays = [state[2][b, p % L] if len(state) == 4 else np.zeros(q.shape[2]) for p in old]
        for i in range(q.shape[1] if causal else T):
            decays = [d + gates[b, i] for d in decays] + [np.zeros(q.shape[2])]
            if causal:
                read(out[b, i], q[b, i], keys[: len(decays)], values, decays, scale, window, normalize, sinks)
        for i in range(0 if causal else q.shape[1]):
            read(out[b, i], q[b, i], keys, values, decays, scale, window, normalize, sinks)
        slots = L + T if window is None else max(min(L + T, window - 1), 1)
        old_k, old_v = (k[b, :0], v[b, :0]) if state is None else (state[0][b], state[1][b])
        end = [ring(old_k, k[b], n, slots), ring(old_v, v[b], n, slots)]
        if g is not None:
            new = np.array(decays[len(old) :]).reshape(T, q.shape[2])
            old_b = new[:0] if state is None else state[2][b] + g[b].sum(axis=0)
            end.append(ring(old_b, new, n, slots))
        ends.append([*end, np.float64(n + T)])
    if not B:
        _, parts = attend(*(None if x is None else np.zeros((1, *x.shape[1:])) for x in (q, k, v, g)),
                              None if state is None else [np.zeros((1, *S.shape[1:])) for S in state],
                              scale, window, normalize, sinks, causal)  # fmt: skip
        return out, tuple(S[:0] for S in parts)
    return out, tuple(map(np.stack, zip(*ends, strict=True)))


def read(out, q, keys, values, decays, scale, window, normalize, sinks):
    """The output of one token: q (Hq, K), keys a list of (Hk, K), values of (H, V), decays of (Hq,)."""
    for h in range(len(out)):
        hq = h // (len(out) // len(q))
        logits = []
        for j, (key, decay) in enumerate(zip(keys, decays, strict=True)):
            inside = window is None or j >= len(keys) - window
            logits.append(scale * q[hq] @ key[h // (len(out) // len(key))] + decay[hq] if inside else -np.inf)
        weights = np.exp(np.array(logits))
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[hq]))
        for weight, value in zip(weights, values, strict=False):
            out[h] += weight / (total if normalize else 1.0) * value[h // (len(out) // len(value))]


def softmax_attention(q, k, v, sinks=None, bias=None, scale=None, state=None, window=None, normalize=True, causal=True):
    """p_tj = e^{z_tj} / (e^{sink} + sum_i e^{z_ti}), z_tj = scale q_t . k_j + bias_tj; out_t = sum_j p_tj v_j."""
    if bias is not None:
        return biased(q, k, v, sinks, bias, scale, window, normalize, causal)
    return attend(q, k, v, None, state, scale, window, normalize, sinks, causal)


def biased(q, k, v, sinks, bias, scale, window, normalize, causal):
    """The same with bias (B, Tq, Hq, T), without a state."""
    (B, T, _, V), scale = v.shape, q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((*q.shape[:2], max(q.shape[2], v.shape[2]), V))
    for b in range(B):
        for i in range(q.shape[1]):
            n = i + 1 if causal else T
            added = list(bias[b, i, :, :n].T)
            read(out[b, i], q[b, i], list(k[b, :n]), list(v[b, :n]), added, scale, window, normalize, sinks)
    return out, (k, v, np.full(B, float(T)))
