"""Files that a script writes at its end, checked for argparse before it begins to work."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

# What matplotlib writes; without an ending it is a PNG.
PICTURES = ("", ".eps", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".webp")


def out_file(text: str) -> Path:
    """A file that can be written, in a folder that is there."""
    path = Path(text)
    if _is_dir(path):
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that is there, got {text!r}")
    _writable(path if path.exists() else path.parent, text)
    return path


def new_file(text: str) -> Path:
    """A file that can be written; its folders are made if they are missing."""
    if _is_dir(Path(text)):
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    new_folder(str(Path(text).parent))
    return Path(text)


def new_folder(text: str) -> Path:
    """A folder that can be written; it is made if it is missing."""
    path = Path(text)
    while not _is_dir(path) and not path.exists():
        path = path.parent
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {str(path)!r}")
    _writable(path, text)
    return Path(text)


def picture(text: str) -> Path:
    """As `out_file`, for matplotlib, which must be there."""
    needs_matplotlib()
    if Path(text).suffix.lower() not in PICTURES:
        expected = f"a name that ends in {', '.join(PICTURES[1:])}"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return out_file(text)


def picture_folder(text: str) -> Path:
    """As `new_folder`, for pictures by matplotlib, which must be there."""
    needs_matplotlib()
    return new_folder(text)


def needs_matplotlib() -> None:
    """ArgumentTypeError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        advice = "pip install 'pit-tvm[plot]'"
        raise argparse.ArgumentTypeError(f"expected the package matplotlib, got none; {advice}")


def _is_dir(path: Path) -> bool:
    """Whether it is a folder; refuses what cannot even be looked up."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a path that can be written: {error}") from error
    return path.is_dir()


def _writable(path: Path, text: str) -> None:
    """Refuse unless this file, or files in this folder, can be written."""
    needed = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    if not os.access(path, needed):
        raise argparse.ArgumentTypeError(f"expected a path that can be written, got {text!r}")
