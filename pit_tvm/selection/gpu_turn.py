"""What it costs on a GPU to turn a matrix first, or a result afterwards. Microseconds, with the
launch (tuning_logs/h200-sm_90a/turn.json)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# A launch; the least time of a wave, in which all CTAs together move `_WAVE` bytes; and what memory
# moves. They fit matrices of 768 x 3072 to 5120 x 7168 elements of 16 bits within 3 %, in float32
# within 17 %.
_START_US, _WAVE_US, _WAVE, _GBPS = 1.2, 0.8, 8192.0 * 8 * 132, 3900.0
# Where live columns alone are turned: a launch, and the bytes that memory gives at once, between
# two sectors and a line. They fit the same matrices, 1 to 50 % of them live, within 8 % in the
# median.
_LIVE_US, _GRANULE = 2.5, 96


def whole_us(size: float, moved: float = 2.0) -> float:
    """A matrix of ``size`` bytes; ``moved``: how often all of it is read and written, 2 unless
    parts are dead."""
    waves = max(size / _WAVE, 1.0)
    return _START_US + math.hypot(_WAVE_US * waves, 1e-3 * size * moved / _GBPS)


def live_us(
    size: float, live: float | npt.NDArray[np.float64], itemsize: int, near: int = 1
) -> float:
    """Live columns of bands of a matrix of ``size`` bytes: the share ``live`` of them, or that of
    each of equal parts, ``near`` neighbours together and these independently of each other."""
    alone = max(_GRANULE / itemsize / near, 1.0)
    moved = np.mean(live + 1.0 - (1.0 - np.minimum(live, 1.0)) ** alone)
    return _LIVE_US + 1e-3 * size * float(moved) / _GBPS
