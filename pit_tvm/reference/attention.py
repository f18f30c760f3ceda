"""What attention and layer norm of whole models mean, in float64 numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .ops import Float64, live


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, starts: ArrayLike, scale: float, *, causal: bool
) -> Float64:
    """softmax(scale * q k^T) v within each sequence and head: ``q`` and ``k`` are ``[t, heads,
    head_dim]``, ``v`` and the result ``[t, heads, value_dim]``.

    Sequence ``i`` is rows ``starts[i]`` to ``starts[i + 1]``; rows of none are NaN. With
    ``causal`` a query sees the keys up to its own position.
    """
    query, key, value = live(q), live(k), live(v)
    edges = np.asarray(starts).tolist()
    out = np.full(value.shape, np.nan)
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        if begin == end:
            continue
        rows = slice(begin, end)
        scores = np.einsum("qhd,khd->hqk", query[rows], key[rows]) * scale
        if causal:
            scores = np.where(np.tri(end - begin, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("hqk,khd->qhd", weights, value[rows])
    return out


def layer_norm(x: ArrayLike, gamma: ArrayLike, beta: ArrayLike, eps: float) -> Float64:
    """Rows of ``x [t, width]`` with mean 0 and variance 1, times ``gamma``, plus ``beta``."""
    rows = live(x)
    centred = rows - rows.mean(axis=1, keepdims=True)
    variance = np.square(centred).mean(axis=1, keepdims=True)
    return centred / np.sqrt(variance + eps) * live(gamma) + live(beta)
