"""What attention and layer norm of whole models mean, in float64 numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..windows import FULL, Window
from .ops import Float64, live


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    starts: ArrayLike,
    scale: float,
    *,
    window: Window = FULL,
    position: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
) -> Float64:
    """softmax(scale * q k^T) v within each sequence and head: ``q`` and ``k`` are ``[t, heads,
    head_dim]``, ``v`` and the result ``[t, heads, value_dim]``.

    Sequence ``i`` is rows ``starts[i]`` to ``starts[i + 1]``; rows of none are NaN. A query sees
    the keys of ``window``, by each row's ``position`` (its number, if None). ``sinks`` ``[heads]``
    are scores of keys whose values are 0.
    """
    query, key, value = live(q), live(k), live(v)
    edges = np.asarray(starts).tolist()
    place = np.arange(len(query)) if position is None else np.asarray(position, np.int64)
    out = np.full(value.shape, np.nan)
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        if begin == end:
            continue
        rows = slice(begin, end)
        scores = np.einsum("qhd,khd->hqk", query[rows], key[rows]) * scale
        scores = np.where(_seen(window, place[rows]), scores, -np.inf)
        sunk = np.empty((len(scores), 0)) if sinks is None else live(sinks)[:, None]
        beside = np.broadcast_to(sunk[:, None], (*scores.shape[:2], sunk.shape[1]))
        scores = np.concatenate([scores, beside], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights[..., : end - begin] / weights.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("hqk,khd->qhd", weights, value[rows])
    return out


def _seen(window: Window, place: np.ndarray) -> np.ndarray:
    """Whether each query sees each key, ``[q, k]``, which stand at the same places."""
    apart = place[:, None] - place[None, :]
    before, after = (np.inf if far is None else far for far in (window.before, window.after))
    return np.asarray((apart <= before) & (-apart <= after))


def masked_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike,
    scale: float,
    sinks: ArrayLike | None = None,
    softcap: float = 0.0,
) -> Float64:
    """softmax(scale * q k^T) v over the keys that ``mask`` lets each query see, zeros where it sees
    none: ``q [batch, heads, queries, dim]``, ``k`` and ``v [batch, kv_heads, keys, ..]``, ``mask``
    of a shape that broadcasts to ``[batch, heads, queries, keys]``. ``sinks`` as in `attention`;
    ``softcap`` other than 0 bounds scores.
    """
    query = live(q)
    share = query.shape[1] // np.shape(k)[1]
    key, value = (np.repeat(live(one), share, axis=1) for one in (k, v))
    scores = query @ key.swapaxes(-1, -2) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask, scores, -np.inf)
    sunk = np.full((1, 1, 1), -np.inf) if sinks is None else live(sinks)[:, None, None]
    peak = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sunk)
    peak = np.where(np.isinf(peak), 0, peak)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sunk - peak)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.asarray(shares @ value)


def layer_norm(x: ArrayLike, gamma: ArrayLike, beta: ArrayLike, eps: float) -> Float64:
    """Rows of ``x [t, width]`` with mean 0 and variance 1, times ``gamma``, plus ``beta``."""
    rows = live(x)
    centred = rows - rows.mean(axis=1, keepdims=True)
    variance = np.square(centred).mean(axis=1, keepdims=True)
    return centred / np.sqrt(variance + eps) * live(gamma) + live(beta)
