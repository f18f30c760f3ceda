"""The records of one device: found, read once when first asked for, and appended to atomically.

On disk a database is a folder with one folder per device; each of those holds ``tiles.json``,
one JSON object per line. A user's database lies over the shipped one: see `TileStore.over_shipped`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

from ..errors import DatabaseError, mismatch
from ..files import write_atomically
from ..locations import tuning_logs_dir
from ..structs import TileTask
from .record import TileRecord, record_from_json

FILE_NAME = "tiles.json"


class TileStore:
    """Records of one device in a database folder; made by ``open``, ``over_shipped`` or ``create``.

    Nothing is read before the first question. What the device has no record of, a family of tiles
    or a library in a data type, comes from the first device of its instruction set that has. A
    store without either answers with nothing: the caller then takes generic tiles and says
    ``untuned``.

    ``roots`` are ``root``, which `append` writes to, and the folder ``beneath`` it, if any. Of one
    device the records of both count; for tasks that ``root`` has records of, these alone.
    """

    def __init__(
        self, root: Path, device: str = "", isa: str = "", beneath: Path | None = None
    ) -> None:
        self.root = root.absolute()  # read later, when the working directory may be another
        self.device = device
        self.isa = isa
        self.roots = (self.root,) if beneath is None else (self.root, beneath)

    @classmethod
    def open(
        cls, path: str | Path | TileStore | None = None, *, device: str = "", isa: str = ""
    ) -> TileStore:
        """A store of a database folder alone, one of its device folders, or a ``tiles.json``.

        Parameters
        ----------
        path
            None for the records shipped with the package; a store is returned as it is.
        device
            Folder to prefer, such as ``TargetInfo.device`` gives it.
        isa
            Devices of this instruction set have, by name, what that folder lacks. Not asked for
            where ``path`` is of one device.

        Raises
        ------
        DatabaseError
            ``path`` does not exist, cannot be read, or is another file.
        """
        if isinstance(path, TileStore):
            return path
        if path is None:
            return cls(tuning_logs_dir(), device, isa)
        if path == "":  # to pathlib the working directory
            raise DatabaseError(mismatch("database", "a path", "''"))
        try:
            found = Path(path)
        except TypeError as error:
            expected = "a path or a TileStore"
            raise DatabaseError(mismatch("database", expected, repr(path))) from error
        try:
            found.stat()
            if found.name == FILE_NAME:
                found = found.parent
            if (found / FILE_NAME).is_file():
                folder = Path(os.path.abspath(found))  # "." has no name
                return cls(folder.parent, folder.name)
            if (found / FILE_NAME).exists():
                found /= FILE_NAME
            elif found.is_dir():
                # A folder that cannot be listed would pass for one without records.
                with os.scandir(found):
                    return cls(found, device, isa)
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            advice = "run pit-tvm tune --out"
            text = mismatch("database", "a path that exists", found, advice)
            raise DatabaseError(text) from error
        except OSError as error:
            raise DatabaseError(mismatch("database", "a path that can be read", error)) from error
        raise DatabaseError(mismatch("database", f"a folder or {FILE_NAME} that is a file", found))

    @classmethod
    def over_shipped(
        cls, path: str | Path | TileStore | None, *, device: str = "", isa: str = ""
    ) -> TileStore:
        """What ``database`` is to `pit_tvm.compile` and to the command: ``path`` over the shipped
        records, which count for tasks that it has none of.

        The arguments, and what is raised, are those of `open`. One device's folder or its
        ``tiles.json`` is read alone, and so is a database where none was shipped.
        """
        store = cls.open(path, device=device, isa=isa)
        if path is None or isinstance(path, TileStore) or store.root != Path(path).absolute():
            return store
        try:
            shipped = tuning_logs_dir()
        except DatabaseError:
            return store
        if store.root.resolve() == shipped.resolve():
            return store
        return cls(store.root, device, isa, beneath=shipped)

    @classmethod
    def create(cls, path: str | Path, *, device: str = "", isa: str = "") -> TileStore:
        """The same, after making the database folder where it is missing."""
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(mismatch("database", "a folder that can be made", error)) from error
        return cls.open(path, device=device, isa=isa)

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the folders that answers are from, the device's own first."""
        return tuple(dict.fromkeys(folder.name for folder in self.used_folders))

    @property
    def used_folders(self) -> tuple[Path, ...]:
        """The folders that answers are from, the device's own first."""
        return tuple(folder for folder, records in self._by_folder.items() if records)

    def folders(self) -> tuple[str, ...]:
        """Names of the device folders in ``root``, sorted."""
        return _device_folders(self.root)

    @cached_property
    def _by_folder(self) -> dict[Path, tuple[TileRecord, ...]]:
        """Of every folder, the nearest first, records of what no nearer one has."""
        names = [self.device] if self.device else []
        if self.isa:
            everyone = chain.from_iterable(map(_device_folders, self.roots))
            names += [name for name in everyone if name.endswith(f"-{self.isa}")]
        found: dict[Path, tuple[TileRecord, ...]] = {}
        known: set[object] = set()
        for name in dict.fromkeys(names):
            of_device: set[object] = set()
            for path in (root / name / FILE_NAME for root in self.roots):
                if _is_file(path):
                    own = read_records(path)
                    found[path.parent] = tuple(
                        r for r in own if known.isdisjoint((_subject(r), _measured(r)))
                    )
                    tasks = [record for record in own if record.task is not None]
                    known |= set(map(_measured, tasks))
                    of_device |= set(map(_subject, tasks))
            known |= of_device
        return found

    @cached_property
    def _all(self) -> tuple[TileRecord, ...]:
        # The device's own last: of constants, which are all there, later ones count.
        return tuple(chain.from_iterable(reversed(self._by_folder.values())))

    def all(self) -> tuple[TileRecord, ...]:
        """Every record for the device, of every kind."""
        return self._all

    @property
    def text(self) -> str:
        """The records, one JSON object per line, as ``tiles.json`` has them."""
        return "".join(f"{json.dumps(record.to_json())}\n" for record in self._all)

    def records(self, family: str | None = None) -> tuple[TileRecord, ...]:
        """Tuned tiles of this family; None takes any."""
        return tuple(
            record
            for record in self._all
            if record.kind == "pit"
            and record.tile is not None
            and family in (None, record.tile.family)
        )

    def best(self, task: TileTask) -> TileRecord | None:
        """The fastest tuned tile measured on exactly this task; None if there is none."""
        measured = [record for record in self.records(task.family) if record.task == task]
        return min(measured, key=lambda record: record.secs, default=None)

    def append(self, records: Sequence[TileRecord]) -> None:
        """Write records into the folders of their devices; safe among processes.

        A record replaces the one of the same kind, tile, task, library and device. Each file is
        written under a temporary name and renamed.

        Raises
        ------
        DatabaseError
            An existing file is corrupt (it is left as it is), or a folder cannot be written.
        """
        devices = dict.fromkeys(record.provenance.device for record in records)
        for device in devices:
            mine = [record for record in records if record.provenance.device == device]
            try:
                _merge(self.root / _folder_name(device), mine)
            except OSError as error:
                raise DatabaseError(
                    mismatch("database", "a folder that can be written", error)
                ) from error
        for name in ("_by_folder", "_all"):
            self.__dict__.pop(name, None)


def read_records(path: Path) -> tuple[TileRecord, ...]:
    """The records of one file, in its order.

    Raises
    ------
    DatabaseError
        The file is unreadable, or a line is no record; the message starts with path and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseError(f"{path}:1: cannot be read as UTF-8 text: {error}") from error
    return _records(path, text)


@lru_cache(maxsize=8)
def _records(path: Path, text: str) -> tuple[TileRecord, ...]:
    """The records of a text. Every operator asks for those of its device, a thousand on a GPU."""
    found = []
    # Not splitlines: a string in JSON may hold what else that takes for an end.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), start=1):
        try:
            found.append(record_from_json(json.loads(line)))
        except (ValueError, RecursionError) as error:  # DatabaseError is a ValueError
            raise DatabaseError(f"{path}:{number}: not a pit-tvm record: {error}") from error
    return tuple(found)


def _is_file(path: Path) -> bool:
    """Whether a device has records there; DatabaseError if that is no file, or nobody can tell."""
    try:
        if path.is_file():
            return True
        if not path.exists():
            return False
    except OSError as error:
        raise DatabaseError(mismatch("database", "folders that can be read", error)) from error
    raise DatabaseError(mismatch("database", f"{FILE_NAME} that is a file", path))


def _device_folders(root: Path) -> tuple[str, ...]:
    return tuple(sorted(file.parent.name for file in root.glob(f"*/{FILE_NAME}")))


def _measured(record: TileRecord) -> object:
    """What a record is a measurement of: a task, by tiles or by a library."""
    return record.kind, record.task, "" if record.tile else record.note


def _subject(record: TileRecord) -> object:
    """What a device has records of or not: a family or library in a data type, or constants."""
    if record.task is None:
        return record.kind
    return record.kind, record.tile.family if record.tile else record.note, record.task.dtype


def _folder_name(device: str) -> str:
    """A device is one folder beside the others, never a path that leads elsewhere."""
    if device in ("", ".", "..") or Path(device).name != device:
        raise DatabaseError(mismatch("provenance.device", "a folder name", repr(device)))
    return device


def _merge(folder: Path, records: Iterable[TileRecord]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with _locked(folder):
        known = {record.key: record for record in read_records(path)} if path.exists() else {}
        known.update({record.key: record for record in records})
        lines = [json.dumps(r.to_json(), separators=(",", ":")) for r in known.values()]
        write_atomically(path, "".join(f"{line}\n" for line in lines))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Held while a file of the folder is read and rewritten; the lock leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
