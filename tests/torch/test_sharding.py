"""Operators, layers and models whose tensors lie on several devices."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.torch.sharding_cases import cases
from tests.torch.sharding_world import RANKS, Outcome, run_group


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All cases, by one group of processes."""
    return _run("cpu", tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """As `on_cpus`."""
    return _run("cuda", tmp_path_factory.mktemp("group"))


def _run(device: str, folder: Path) -> Outcome:
    seed = random.randrange(2**31)
    print("seed", seed)
    return run_group(cases, device, seed, folder)


@pytest.mark.parametrize("name", cases())
def test_devices_compute_together(on_cpus: Outcome, name: str) -> None:
    assert name in on_cpus.done, on_cpus.fault


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", cases())
def test_gpus_compute_together(on_gpus: Outcome, name: str) -> None:
    assert name in on_gpus.done, on_gpus.fault
