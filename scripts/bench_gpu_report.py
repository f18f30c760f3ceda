"""What the GPU benchmark reports: the machine, rows as they come, and the goals at the end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import torch
from bench_gpu_cases import (
    HELD_OUT_EXPERTS,
    HELD_OUT_LAYERS,
    HELD_OUT_LIVE,
    HELD_OUT_TRAINED,
)
from bench_gpu_measure import ERROR_LIMIT, GpuSettings
from bench_report import stamp
from bench_rows import SEED_KEY, Row, Suite, Target

from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import TileRecord
from pit_tvm.tile_db.store import TileStore

PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "torch", "triton")
QUERY = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
NARROW = 8  # characters of a column at least


def describe(settings: GpuSettings) -> dict[str, Any]:
    """Where, with what and when this run measures, as JSON values."""
    cuda = settings.device == "cuda"
    return {
        **machine(cuda),
        "tile database": {"records": len(database(settings))},
        "seeds": [SEED_KEY, settings.seed],
        "repeats": settings.repeats,
        "sustained ms": settings.sustained,
        "quick": settings.quick or not cuda,
        "error limit": ERROR_LIMIT,
        "held out": [
            list(shape)
            for shapes in (HELD_OUT_LIVE, HELD_OUT_EXPERTS, HELD_OUT_LAYERS, HELD_OUT_TRAINED)
            for shape in shapes
        ],
    }


def machine(cuda: bool) -> dict[str, Any]:
    """Where, with what and when anything runs, as JSON values."""
    return {
        **stamp(*PACKAGES, cuda=torch.version.cuda or "none"),
        "device": torch.cuda.get_device_name() if cuda else "none: a dry run on the CPU",
        "clocks": clocks() if cuda else {},
    }


def database(settings: GpuSettings) -> Sequence[TileRecord]:
    """Records of the tile database that plans are made from."""
    target = resolve_target(settings.planned_target)
    return TileStore.open(device=target.device, isa=target.isa).all()


def clocks() -> dict[str, str]:
    """What ``nvidia-smi`` says of the first GPU now; empty where it is missing or refuses."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, "-i", "0", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY, values, strict=False)) if done.returncode == 0 else {}


class Printer:
    """A suite's table, line by line: a run that is cut short leaves what it has."""

    def __init__(self, suite: Suite, labels: Sequence[str]) -> None:
        self.suite = suite
        self._first = max(map(len, labels), default=0)
        self._widths = [max(NARROW, len(column.heading)) for column in suite.columns]

    def head(self) -> str:
        """Title and headings."""
        headings = [column.heading for column in self.suite.columns]
        return f"\n{self.suite.name}: {self.suite.title}\n{self._line('', headings)}"

    def row(self, row: Row) -> str:
        """One row; held-out ones end with a mark, and so do wrong contenders."""
        if "failed" in row.facts:
            return f"{row.label.ljust(self._first)}  failed: {row.facts['failed']}"
        line = self._line(row.label, [column.text(row) for column in self.suite.columns])
        wrong = f"  WRONG: {', '.join(row.wrong)}" if row.wrong else ""
        plain = [name for name in row.facts.get("without_graph", ()) if name == "pit"]
        marks = "  (held out)" * row.held_out + "  (pit without a graph)" * len(plain)
        return f"{line}{marks}{wrong}"

    def _line(self, first: str, cells: Sequence[str]) -> str:
        padded = [c.rjust(w) for c, w in zip(cells, self._widths, strict=True)]
        return " ".join([first.ljust(self._first), *padded]).rstrip()


def goals(targets: Sequence[Target], judged: bool) -> str:
    """The issue's goals, one a line: reached or not, by the worst row that each is about."""
    lines = [f"goals, each by its worst row{'' if judged else ' (not judged: small or dry run)'}:"]
    for target in targets:
        mark = ("reached " if target.met else "MISSED  ") if judged else "        "
        lines.append(f"{mark}{target}")
    return "\n".join(lines)
