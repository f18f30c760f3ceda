"""Whether a layer of few tokens reads the weights of their experts choice by choice."""

from __future__ import annotations

MOST_CHOICES = 256  # of tokens together: others are never faster so
# Bytes a microsecond that an H200 reads from memory, and from its second-level cache where choices
# of one expert meet; microseconds beyond reading of two kernels that read choice by choice, and of
# an index, tiles of few rows and sums (tuning_logs/h200-sm_90a/experts_few_tokens.json).
_MEMORY, _CACHE = 4.25e6, 5.5e6
_CHOICES_US, _TILES_US = 5.0, 21.0


def by_choices(tokens: int, top_k: int, groups: int, size: int) -> bool:
    """Whether that is faster than tiles of the rows of every expert; ``size``: bytes of the weights
    of one of ``groups`` experts."""
    if not 0 < tokens * top_k <= MOST_CHOICES or not groups:
        return False
    tiles_us = _TILES_US + _once_us(tokens, top_k, groups, size)
    return choices_us(tokens, top_k, groups, size) < tiles_us


def choices_us(tokens: int, top_k: int, groups: int, size: int) -> float:
    """Microseconds of a layer choice by choice."""
    once = _once_us(tokens, top_k, groups, size)
    return _CHOICES_US + max(tokens * top_k * size / _CACHE, once)


def _once_us(tokens: int, top_k: int, groups: int, size: int) -> float:
    """Microseconds that the weights of all experts take that somebody chose. Tokens are taken to
    choose evenly: counts would have to be made first."""
    share = min(top_k / groups, 1.0)
    return groups * (1.0 - (1.0 - share) ** tokens) * size / _MEMORY
