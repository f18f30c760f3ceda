"""Fresh interpreters, for what a process knows from its first step on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_python(
    code: str, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> list[str]:
    """Words that a fresh interpreter prints, in ``environment`` (None: this one's) and with this
    one's paths; it must end well within ``timeout`` seconds."""
    inherited = os.environ if environment is None else environment
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
