"""The index of a padded batch: where its live tokens are, and where each goes when packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import as_numpy


def live_tokens(mask: Any) -> tuple[np.ndarray, ...]:
    """List the live tokens of an attention mask, sequence by sequence.

    Parameters
    ----------
    mask
        ``[batch, tokens]``, 1 where a token is and 0 where none is; any pattern.

    Returns
    -------
    tuple of numpy.ndarray
        int32: each live token's row in the flattened plane, its position and its sequence,
        ``[live]``; where each sequence starts in these lists, and their length, ``[batch + 1]``;
        each token's place in the lists, -1 for a dead one, ``[batch, tokens]``.
    """
    alive = as_numpy(mask, "mask") != 0
    batch, tokens = alive.shape
    row = np.flatnonzero(alive).astype(np.int32)
    sequence, position = np.divmod(row, np.int32(max(tokens, 1)))
    starts = np.zeros(batch + 1, np.int32)
    np.cumsum(alive.sum(axis=1), out=starts[1:])
    place = np.full(batch * tokens, -1, np.int32)
    place[row] = np.arange(len(row), dtype=np.int32)
    return row, position, sequence, starts, place.reshape(batch, tokens)
