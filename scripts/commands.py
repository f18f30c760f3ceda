"""What the command lines of scripts have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from pit_tvm.errors import PitError


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's own text, in its lines."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=raw)


def status_of(script: str, run: Callable[[], int]) -> int:
    """The exit status that ``run`` gives, or 2, with a line that says why, if something is
    missing."""
    try:
        return run()
    except PitError as error:
        print(f"{script}: error: {error}", file=sys.stderr)
        return 2
