"""Pictures as the paper draws them, of suites that vary one thing: a line for each pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKS = "osD^v<>PX*hpd8"
MOST_NAMES = 34  # in a column of the legend


@dataclass(frozen=True)
class Curves:
    """What is drawn over the fact ``x``: ``ratios`` to dense, facts, or ``times`` of contenders."""

    x: str
    ratios: tuple[str, ...] = ()
    times: tuple[str, ...] = ()


CURVES = {
    "conversion": Curves("zeros", times=("pit", "csr", "bsr", "blocks")),
    "granularity": Curves("zeros", ("over_dense",)),
    "tensorcore": Curves("zeros", ("over_dense", "rows_over_dense")),
    "weights": Curves("zeros", ("over_dense",)),
    "outputs": Curves("dead", ("over_dense",)),
    "sread": Curves("bytes", ("over_dense", "ordered_over_dense")),
}


def lines(
    rows: Sequence[Mapping[str, Any]], curves: Curves
) -> dict[str, list[tuple[float, float]]]:
    """Points of every line, by its name: a row's label without its end, the number and unit of
    what varies, and what is drawn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        pattern, x = row["label"].rsplit(" ", 2)[0], row["facts"][curves.x]
        values = {name: row["facts"].get(name) for name in curves.ratios}
        values |= {name: row["stats_us"].get(name, {}).get("median") for name in curves.times}
        for name, value in values.items():
            if value is not None:
                found.setdefault(f"{pattern}, {name}", []).append((x, value))
    return {name: sorted(points) for name, points in found.items()}


def plot_curves(path: Path, rows: Sequence[Mapping[str, Any]], curves: Curves, title: str) -> None:
    """Draw the lines of a suite's rows into ``path``."""
    from matplotlib.figure import Figure

    drawn = lines(rows, curves)
    columns = 1 + len(drawn) // MOST_NAMES
    figure = Figure(figsize=(8.0 + 3.0 * columns, 5.0), layout="constrained")
    axes = figure.subplots()
    for number, (name, points) in enumerate(drawn.items()):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker=MARKS[number % len(MARKS)], markersize=4, label=name)
    if curves.ratios:
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="dense")
    axes.set_ylabel("times as fast as dense" if curves.ratios else "us, medians")
    axes.set_xlabel(curves.x)
    axes.set_yscale("log")
    if curves.x == "bytes":
        axes.set_xscale("log", base=2)
    axes.grid(which="both", alpha=0.3)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=6, ncols=columns, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)
