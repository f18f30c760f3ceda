"""Whether the products of few tokens read the weights of their experts choice by choice."""

from __future__ import annotations

# Bytes a microsecond that an H200 reads from memory, and from its second-level cache where choices
# of one expert meet; and microseconds that an index, tiles of few rows and sums take beyond reading
# (tuning_logs/h200-sm_90a/experts_few_tokens.json).
_MEMORY, _CACHE = 4.25e6, 5.5e6
_TILES_US = 16.0


def by_choices(tokens: int, top_k: int, groups: int, size: int) -> bool:
    """Whether a layer is faster by `choices_kernel` than by tiles of the rows of every expert;
    ``size``: bytes of the weights of one of ``groups`` experts. Tokens are taken to choose evenly:
    counts would have to be made first."""
    share = min(top_k / groups, 1.0)
    distinct = groups * (1.0 - (1.0 - share) ** tokens) * size / _MEMORY
    return max(tokens * top_k * size / _CACHE, distinct) < distinct + _TILES_US
