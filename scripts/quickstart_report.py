"""How the quickstart reports: the table, the values of the JSON line and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from quickstart_contenders import PROJECTIONS, Case
from quickstart_measure import CONTENDERS, Samples


def print_table(cases: Sequence[Case], samples: Sequence[Samples], fill: float) -> None:
    """One line per layer; times in milliseconds."""
    print(
        f"{'layer':13} {'fill':>6} {'numpy':>9} {'torch':>9} {'torch':>9} {'pit-tvm':>9} "
        f"{'speed-up':>8} {'largest':>9}  kernel\n"
        f"{'':13} {'':>6} {'dense':>9} {'padded':>9} {'gather':>9} {'':>9} "
        f"{'on torch':>8} {'rel. err.':>9}"
    )
    for case, kept in zip(cases, samples, strict=True):
        times = " ".join(f"{kept.ms(name):9.3f}" for name in CONTENDERS)
        gain = kept.ms("torch") / kept.ms("pit")
        kernels = ", ".join(sorted(kept.kernels))
        print(
            f"{case.name:13} {fill:6.3f} {times} {gain:8.2f} {kept.errors['pit']:9.1e}  {kernels}"
        )


def summarise(samples: Sequence[Samples], fill: float) -> dict[str, Any]:
    """The values of the JSON line: times are sums over the layers of their medians."""
    total = {name: sum(kept.ms(name) for kept in samples) for name in CONTENDERS}
    return {
        "fill": round(fill, 4),
        "torch_ms": round(total["torch"], 3),
        "torch_gather_ms": round(total["torch_gather"], 3),
        "numpy_ms": round(total["numpy"], 3),
        "kernels": sorted(set().union(*(kept.kernels for kept in samples))),
        "pit_ms": round(total["pit"], 3),
        "speedup_vs_torch": round(total["torch"] / total["pit"], 3),
        "index_us": round(statistics.median(us for kept in samples for us in kept.index_us), 2),
        "select_us": round(statistics.median(us for kept in samples for us in kept.select_us), 2),
        "max_rel_err": max(kept.errors["pit"] for kept in samples),
    }


def plot(path: str, samples: Sequence[Samples]) -> None:
    """Bars of the time by projection, summed over the layers, written as PNG to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(CONTENDERS)
    for number, name in enumerate(CONTENDERS):
        heights = [
            sum(kept.ms(name) for kept in samples[start :: len(PROJECTIONS)])
            for start in range(len(PROJECTIONS))
        ]
        axes.bar([x + number * width for x in range(len(heights))], heights, width, label=name)
    axes.set_xticks([x + 1.5 * width for x in range(len(PROJECTIONS))], PROJECTIONS)
    axes.set_ylabel("ms, all layers, one batch")
    axes.legend()
    figure.savefig(path, dpi=120)
