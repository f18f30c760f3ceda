"""How candidates of one kind of target are built, run, checked and compared with a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm
from tvm.target import Target

from ..structs import TileTask
from ..target import TargetInfo
from ..tile_db.record import TileRecord
from .builder import Lower, TileBuilder
from .calibrate import measure_profile
from .runner import Data, OpenSession, local_session
from .tasks import Space, make_example


class Builder(Protocol):
    """What makes libraries of candidates, and may work ahead.

    Both raise BackendUnavailable for what says nothing about a candidate.
    """

    def warm(self, mods: Sequence[tvm.IRModule]) -> None:
        """Prepare for ``build`` of these."""

    def build(self, mod: tvm.IRModule) -> Path | str:
        """The library, or what is wrong with the candidate."""


@dataclass(frozen=True)
class Backend:
    """``make_builder(lower, target, folder)``: one that leaves artifacts in a folder.
    ``make_data(space, task, rng)``: fresh arguments of a task, and their check.
    ``measure_profile(target, more)``: the device's constants. ``here``: this process runs the
    candidates."""

    open_session: OpenSession
    make_builder: Callable[[Lower, Target, Path], Builder]
    make_data: Callable[[Space, TileTask, np.random.Generator], Data] = make_example
    measure_profile: Callable[[TargetInfo, Mapping[str, Callable[[], float]]], TileRecord] = (
        measure_profile
    )
    here: bool = True


def host_backend(sessions: OpenSession = local_session) -> Backend:
    """CPU candidates, in this process or where ``sessions`` lead; built in this process, and
    linked by whoever runs them."""
    here = sessions is local_session
    suffix = ".so" if here else ".tar"

    def make_builder(lower: Lower, target: Target, folder: Path) -> Builder:
        return TileBuilder(lower, target, folder, suffix)

    return Backend(sessions, make_builder, here=here)
