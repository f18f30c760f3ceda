"""A group of processes that compute cases together, each on its part of distributed tensors."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

RANKS = 2
WAIT = datetime.timedelta(seconds=120)  # for another process, which may have failed
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of whole models, too


@dataclass(frozen=True)
class World:
    """The devices of the group, and the type of what is computed on them."""

    mesh: DeviceMesh
    dtype: torch.dtype

    @property
    def device(self) -> str:
        return self.mesh.device_type

    def random(self, *shape: int) -> torch.Tensor:
        """The same numbers on every device."""
        return torch.randn(shape).to(self.device, self.dtype)

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Results are alike, wherever they lie."""
        if isinstance(got, DTensor):
            got, want = _alike(got, want)
        got, want = got.detach().double(), want.detach().double()
        assert got.shape == want.shape
        error = float((got - want).norm() / want.norm().clamp(min=1e-30))
        assert error <= LIMITS[self.dtype], f"error {error}"

    def place(self, tensor: torch.Tensor, placement: Placement) -> DTensor:
        """A tensor that is distributed: parts lie as they are cut, of sums the first device has
        all."""
        part, rank = tensor, self.mesh.get_local_rank()
        if isinstance(placement, Shard):
            part = tensor.tensor_split(RANKS, placement.dim)[rank]
        elif placement.is_partial() and rank:
            part = torch.zeros_like(tensor)
        sizes = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(part, self.mesh, [placement], run_check=False, **sizes)


def _alike(got: DTensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What of both is here, or of sums the whole."""
    if any(place.is_partial() for place in got.placements):
        return got.full_tensor(), want
    part = distribute_tensor(want.detach(), got.device_mesh, got.placements)
    return got.to_local(), part.to_local()


Case = Callable[[World], None]
Load = Callable[[], Mapping[str, Case]]  # processes are sent its name


@dataclass(frozen=True)
class Outcome:
    """The cases that all processes ended, and what went wrong in the next one."""

    done: frozenset[str]
    fault: str


def run_group(load: Load, device: str, seed: int, folder: Path) -> Outcome:
    """Compute the cases that ``load()`` gives, in order, until one fails."""
    fault = ""
    # Forked off one process that has only imported what they share: imports take the longest.
    # CUDA is not for processes that are forked where anything asked for a device.
    multiprocessing.set_forkserver_preload([load.__module__])
    method = "forkserver" if device == "cpu" else "spawn"
    try:
        start: Any = torch.multiprocessing.start_processes
        start(_member, (load, device, seed, folder), nprocs=RANKS, start_method=method)
    except torch.multiprocessing.ProcessRaisedException as error:
        fault = str(error)
    ended = [_log(folder, rank).read_text().splitlines() for rank in range(RANKS)]
    return Outcome(frozenset.intersection(*map(frozenset, ended)), fault)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.txt"


def _member(rank: int, load: Load, device: str, seed: int, folder: Path) -> None:
    """One process of the group."""
    with _log(folder, rank).open("w") as log, _joined(rank, device, folder):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        world = World(init_device_mesh(device, (RANKS,)), dtype)
        for number, (name, case) in enumerate(load().items()):
            torch.manual_seed(seed + number)
            case(world)
            print(name, file=log, flush=True)


@contextmanager
def _joined(rank: int, device: str, folder: Path) -> Iterator[None]:
    """Be part of the group; alone a process would use all processors."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    where = {"init_method": f"file://{folder / 'group'}", "rank": rank, "world_size": RANKS}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT, **where)
    try:
        yield
    finally:
        dist.destroy_process_group()
