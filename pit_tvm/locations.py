"""Where the project's two top-level folders are, in an installed package and in a source tree."""

from __future__ import annotations

from pathlib import Path

from .errors import DatabaseError, mismatch


def source_root() -> Path | None:
    """Root of the source tree that this package is imported from; None if it was installed."""
    root = Path(__file__).resolve().parent.parent
    # Both, because an installed package may stand beside some other project's setup.py.
    is_root = (root / "setup.py").is_file() and (root / "schedules").is_dir()
    return root if is_root else None


def tuning_logs_dir() -> Path:
    """Folder of the tuning records shipped with the package, one folder per device inside.

    Raises
    ------
    DatabaseError
        The folder is missing; the message lists the paths that were tried.
    """
    tried = [Path(__file__).resolve().parent / "tuning_logs"]
    root = source_root()
    if root is not None:
        tried.append(root / "tuning_logs")
    for path in tried:
        if path.is_dir():
            return path
    raise DatabaseError(
        mismatch(
            "tuning_logs",
            f"a folder at {' or '.join(map(str, tried))}",
            "none",
            "install the package again, or name a database",
        )
    )
