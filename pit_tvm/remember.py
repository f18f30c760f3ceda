"""Caches of what a call worked out: they start again when they are full."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Made = TypeVar("Made")

MOST = 4096  # kept by one cache; making one again costs some 50 us


def remember(cache: dict[Key, Made], key: Key, made: Made, most: int = MOST) -> Made:
    """Keep ``made``, and return it; a cache of ``most`` entries is emptied first."""
    if len(cache) >= most:
        cache.clear()
    cache[key] = made
    return made
