"""What layers on activations do call by call: when they look at values, and what they report."""

from __future__ import annotations

from dataclasses import dataclass

from .linear import LinearForm


@dataclass(frozen=True)
class Activity:
    """What a layer on activations did at ``rows`` (first and last number of them).

    ``layer`` counts the model's linear layers, ``form`` and ``after`` say what it is. ``live`` is
    the share of micro-tiles (``micro_tile``, rows x 1) that lived when last sampled, ``gathers``
    the decision. ``calls``: gathered ones, and all. ``dropped``: norm of what a threshold dropped
    over that of all activations; None without one.
    """

    layer: int
    form: LinearForm
    after: str
    rows: tuple[int, int]
    micro_tile: str
    live: float
    gathers: bool
    calls: tuple[int, int]
    dropped: float | None

    def __str__(self) -> str:
        first, last = self.rows
        rows = f"{first}" if first == last else f"{first} to {last}"
        way = "gathered" if self.gathers else "dense"
        text = (
            f"layer {self.layer} ({self.form}, after {self.after}) at {rows} rows: {way}, "
            f"{self.live:.2f} of {self.micro_tile} live; gathered in {self.calls[0]} of "
            f"{self.calls[1]} calls"
        )
        return text if self.dropped is None else f"{text}; dropped {self.dropped:.2%} of the norm"


@dataclass
class Turns:
    """Counts calls: all, those that gathered, and those up to the next sample. Between two samples
    calls double, up to ``most``."""

    most: int
    samples: int = 0
    until_sample: int = 0
    gathered: int = 0
    calls: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the next call begins with a sample."""
        return self.until_sample <= 0

    def sampled(self) -> None:
        """A call has taken a sample."""
        self.until_sample = min(2**self.samples, self.most)
        self.samples += 1

    def called(self, gathers: bool) -> None:
        """A call runs, and whether it gathers."""
        self.until_sample -= 1
        self.calls += 1
        self.gathered += gathers
