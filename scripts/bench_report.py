"""How a benchmark reports: tables, the JSON file, and the line of targets."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_rows import Row, Suite, Target

from pit_tvm import __version__
from pit_tvm.files import write_atomically


@dataclass(frozen=True)
class Result:
    """Everything that was measured of one suite."""

    suite: Suite
    rows: tuple[Row, ...]

    def targets(self) -> list[Target]:
        """The suite's limits, for the rows that there are."""
        return self.suite.targets(self.rows)

    def wrong(self) -> list[str]:
        """Rows and contenders with wrong results."""
        return [f"{self.suite.name} {r.label}: {name}" for r in self.rows for name in r.wrong]


def table(result: Result) -> str:
    """The suite's rows in columns; held-out ones apart."""
    columns, title = result.suite.columns, f"{result.suite.name}: {result.suite.title}"
    if not result.rows:
        return f"{title}\nno held-out shapes: nothing here is tuned"
    lines = [["", *(column.heading for column in columns)]]
    lines += [[row.label, *(column.text(row) for column in columns)] for row in result.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

    def text(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        # The last column may be long text, as a kernel's name is.
        return "  ".join([*padded[:-1], cells[-1]]).rstrip()

    head, *body = map(text, lines)
    ordinary = [line for line, row in zip(body, result.rows, strict=True) if not row.held_out]
    apart = [line for line, row in zip(body, result.rows, strict=True) if row.held_out]
    return "\n".join(
        [title, head, *ordinary, *(["held out, never tuned on:"] if apart else []), *apart]
    )


def stamp(*packages: str, **others: str) -> dict[str, Any]:
    """When and with which versions of these packages anything runs, and of ``others``, as JSON
    values."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "pit-tvm": __version__,
            **{name: _version(name) for name in packages},
            **others,
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def to_json(where: dict[str, Any], results: Sequence[Result], targets: Sequence[Target]) -> str:
    """The whole run as one JSON document; an error that is infinite becomes null."""

    def row(measured: Row) -> dict[str, Any]:
        errors = {n: e if math.isfinite(e) else None for n, e in measured.errors.items()}
        stats = {name: asdict(stat) for name, stat in measured.stats.items()}
        return {
            "label": measured.label,
            "held_out": measured.held_out,
            "stats_us": stats,
            "facts": measured.facts,
            "errors": errors,
            "wrong": measured.wrong,
        }

    document = {
        **where,
        "load at the end": list(os.getloadavg()),
        "suites": {
            r.suite.name: {"title": r.suite.title, "rows": list(map(row, r.rows))} for r in results
        },
        "targets": [{**asdict(t), "met": None if where["quick"] else t.met} for t in targets],
    }
    return json.dumps(document, indent=1, allow_nan=False, default=float) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file by renaming a finished one, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def summary(results: Sequence[Result], targets: Sequence[Target], quick: bool) -> dict[str, Any]:
    """Targets met and not met, and wrong results; quick sizes are held to no target."""
    judged = [] if quick else targets
    return {
        "quick": quick,
        "suites": [result.suite.name for result in results],
        "met": [str(target) for target in judged if target.met],
        "not_met": [str(target) for target in judged if not target.met],
        "wrong": [text for result in results for text in result.wrong()],
    }
