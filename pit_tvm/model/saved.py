"""A compiled model as one file: a zip archive of arrays, libraries and a manifest in JSON.

It holds code, which loading runs: load files only from where you would install software.
"""

from __future__ import annotations

import json
import platform
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import BackendUnavailable, SavedModelError, UnsupportedTarget, mismatch
from ..files import as_path, whole_file
from ..memory import numpy_dtype
from ..runtime.content_keys import content_key
from ..target import TargetInfo, missing_features, needed_features, resolve_target, runs_here
from ..tile_db.store import FILE_NAME, TileStore
from .experts import GroupedLayer
from .inputs import Inputs
from .linear import LinearLayer
from .manifest import check_manifest
from .outputs import Outputs
from .propagate import Decision

# What this module writes; another number when the members or their meaning change.
_FORMAT = 5
_MANIFEST, _LIBRARY, _TILES, _KERNELS = "manifest.json", "machine.so", FILE_NAME, "kernels"
_PROGRAM = "program.py"
_SAME = ("apache-tvm", "apache-tvm-ffi")  # packages whose versions must be equal
_AGAIN = "compile and save the model again with the versions here"
# What a file raises that is no whole one of ours; RuntimeError: members that are encrypted, or
# compressed in a way that is not known here.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    AttributeError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class ProgramText:
    """A graph as Python (`pit_tvm.model.torch_program`): its source; the constants that it names;
    what the functions that it calls are in it, by their own names; which of these are kernels, with
    the key of their library; and whether what it launches may be recorded and replayed."""

    source: str
    constants: Mapping[str, np.ndarray]
    functions: Mapping[str, str]
    replayable: bool
    libraries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """All that a model needs to run: its target; its inputs, outputs and decisions; its graph, as
    the library of a CPU's machine or a GPU's text; its linear layers, compiled kernels by key, the
    tiles to choose from, the size up to which activations count as zero, and layers of experts."""

    target: TargetInfo
    inputs: Inputs
    outputs: Outputs
    decisions: Sequence[Decision]
    graph: bytes | ProgramText
    layers: Sequence[LinearLayer]
    kernels: Mapping[str, bytes]
    tiles: str
    threshold: float | None
    grouped: Sequence[GroupedLayer] = ()


def write(parts: Parts, path: str | Path) -> None:
    """Write a file under a temporary name beside ``path``, then rename it.

    Raises
    ------
    SavedModelError
        The file cannot be written.
    """
    try:
        with whole_file(as_path(path)) as file, zipfile.ZipFile(file, "w") as archive:
            _fill(archive, parts)
    except OSError as error:
        raise SavedModelError(mismatch("path", "a file that can be written", error)) from error


def read(path: str | Path) -> Parts:
    """What `write` wrote, checked against this machine and the versions here.

    Raises
    ------
    SavedModelError
        The file is missing, damaged, of another kind, or written with other versions.
    UnsupportedTarget
        This machine lacks the GPU, or its CPU instructions, that the model was compiled for.
    """
    try:
        with zipfile.ZipFile(as_path(path)) as archive:
            manifest = _manifest(archive)
            check_manifest(str(path), manifest)
            _check_versions(manifest)
            target = _target(manifest)
            _check_members(archive, manifest)
            return _parts(archive, manifest, target)
    except OSError as error:
        raise SavedModelError(mismatch("path", "a file that can be read", error)) from error
    except _DAMAGE as error:
        if isinstance(error, BackendUnavailable | SavedModelError | UnsupportedTarget):
            raise
        advice = "save the model again"
        text = mismatch(str(path), "a whole file that a compiled model saved", error, advice)
        raise SavedModelError(text) from error


def tile_store(tiles: str, target: TargetInfo) -> TileStore:
    """A store with these records, which needs no folder from here on."""
    with tempfile.TemporaryDirectory(prefix="pit-tvm-") as folder:
        (Path(folder) / FILE_NAME).write_text(tiles, encoding="utf-8")
        store = TileStore.open(folder, isa=target.isa)
        store.all()
    return store


# --------------------------------------------------------------------------------------------


def _fill(archive: zipfile.ZipFile, parts: Parts) -> None:
    manifest = {
        "format": _FORMAT,
        "versions": _versions(),
        "code": content_key(),
        "target": parts.target.tvm_target,
        "features": sorted(needed_features(parts.target)),
        "graph": _write_graph(archive, parts.graph),
        "inputs": parts.inputs.to_json(),
        "outputs": parts.outputs.to_json(),
        "decisions": [asdict(decision) for decision in parts.decisions],
        "layers": [
            _write_layer(archive, str(number), layer, ("activation", "dtype", "after"))
            for number, layer in enumerate(parts.layers)
        ],
        "grouped": [
            _write_layer(archive, f"grouped_{number}", layer, ("activation", "dtype", "choices"))
            for number, layer in enumerate(parts.grouped)
        ],
        "kernels": sorted(parts.kernels),
        "threshold": parts.threshold,
    }
    archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
    archive.writestr(_TILES, parts.tiles)
    for key, content in parts.kernels.items():
        archive.writestr(f"{_KERNELS}/{key}.so", content)


def _write_layer(
    archive: zipfile.ZipFile, of: str, layer: Any, form: Sequence[str]
) -> dict[str, Any]:
    """Write a layer's arrays; what the manifest says of it."""
    members = {"weight": f"weights/{of}.npy"}
    if layer.bias is not None:
        members["bias"] = f"biases/{of}.npy"
    for name, member in members.items():
        _write_array(archive, member, getattr(layer, name))
    return members | {name: getattr(layer, name) for name in form}


def _read_layer(archive: zipfile.ZipFile, one: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What `_write_layer` wrote, by the names of a layer's parts; ValueError if these are not of
    one layer, whose weight has so many dimensions."""
    weight, bias = (
        _read_array(archive, one[name], one["dtype"]) if name in one else None
        for name in ("weight", "bias")
    )
    shapes = [each.shape for each in (weight, bias) if each is not None]
    if len(shapes[0]) != rank or shapes[1:] not in ([], [shapes[0][:-1]]):
        expected = f"a weight of {rank} dimensions, and a bias of all but the last"
        raise ValueError(mismatch(one["weight"], expected, shapes))
    return {**one, "weight": weight, "bias": bias}


def _parts(archive: zipfile.ZipFile, manifest: Mapping[str, Any], target: TargetInfo) -> Parts:
    return Parts(
        target,
        Inputs.from_json(manifest["inputs"]),
        Outputs.from_json(manifest["outputs"]),
        [Decision(**one) for one in manifest["decisions"]],
        _read_graph(archive, manifest["graph"]),
        [LinearLayer(**_read_layer(archive, one, 2)) for one in manifest["layers"]],
        {key: archive.read(f"{_KERNELS}/{key}.so") for key in manifest["kernels"]},
        archive.read(_TILES).decode("utf-8"),
        manifest["threshold"],
        [GroupedLayer(**_read_layer(archive, one, 3)) for one in manifest["grouped"]],
    )


def _check_members(archive: zipfile.ZipFile, manifest: Mapping[str, Any]) -> None:
    """ValueError if the archive has members that the manifest does not name."""
    graph = manifest["graph"]
    named = {_MANIFEST, _TILES, _PROGRAM if graph else _LIBRARY}
    named.update(f"constants/{name}.npy" for name in graph.get("constants", ()))
    named.update(f"{_KERNELS}/{key}.so" for key in manifest["kernels"])
    for layer in (*manifest["layers"], *manifest["grouped"]):
        named.update(layer[name] for name in ("weight", "bias") if name in layer)
    others = sorted(set(archive.namelist()) - named)
    if others:
        raise ValueError(mismatch(_MANIFEST, "to name all members", f"none of {others}"))


def _write_graph(archive: zipfile.ZipFile, graph: bytes | ProgramText) -> dict[str, Any]:
    """Write the graph's members; what the manifest says of it."""
    if isinstance(graph, bytes):
        archive.writestr(_LIBRARY, graph)
        return {}
    archive.writestr(_PROGRAM, graph.source)
    for name, array in graph.constants.items():
        _write_array(archive, f"constants/{name}.npy", array)
    return {
        "constants": {name: array.dtype.name for name, array in graph.constants.items()},
        "functions": dict(graph.functions),
        "replayable": graph.replayable,
        "libraries": dict(graph.libraries),
    }


def _read_graph(archive: zipfile.ZipFile, found: Mapping[str, Any]) -> bytes | ProgramText:
    if not found:
        return archive.read(_LIBRARY)
    constants = {
        name: _read_array(archive, f"constants/{name}.npy", dtype)
        for name, dtype in found["constants"].items()
    }
    return ProgramText(archive.read(_PROGRAM).decode("utf-8"), **{**found, "constants": constants})


def _write_array(archive: zipfile.ZipFile, member: str, array: np.ndarray) -> None:
    """numpy's format, which has no name for bfloat16: its bits are written."""
    bits = array.view(np.uint16) if array.dtype == numpy_dtype("bfloat16") else array
    with archive.open(member, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asarray(bits, order="C"), allow_pickle=False)


def _read_array(archive: zipfile.ZipFile, member: str, dtype: str) -> np.ndarray:
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
    bits = "uint16" if dtype == "bfloat16" else dtype
    if array.dtype.name != bits:
        raise ValueError(mismatch(f"type of {member}", bits, array.dtype.name))
    return array.view(numpy_dtype("bfloat16")) if dtype == "bfloat16" else array


def _manifest(archive: zipfile.ZipFile) -> Mapping[str, Any]:
    found = json.loads(archive.read(_MANIFEST))
    if found["format"] != _FORMAT:
        raise SavedModelError(mismatch("format", _FORMAT, found["format"], _AGAIN))
    return found  # type: ignore[no-any-return]


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in (*_SAME, "numpy")}
    return {"pit_tvm": __version__, **packages}


def _check_versions(manifest: Mapping[str, Any]) -> None:
    """Compiled code calls TVM and pit-tvm, and is called by them, as these versions do it."""
    ours, theirs = _versions(), manifest["versions"]
    for name in ("pit_tvm", *_SAME):
        if ours[name] != theirs[name]:
            expected = f"{theirs[name]}, with which the model was compiled"
            advice = f"install {name} {theirs[name]}, or {_AGAIN}"
            raise SavedModelError(mismatch(f"version of {name}", expected, ours[name], advice))
    if manifest["code"] != content_key():
        expected = f"the code of {__version__} for {platform.machine()} that compiled the model"
        raise SavedModelError(mismatch("pit_tvm", expected, "other code", _AGAIN))


def _target(manifest: Mapping[str, Any]) -> TargetInfo:
    info = resolve_target(manifest["target"])
    if info.kind == "cuda" and not runs_here(info):
        advice = "compile and save it on a machine with the GPU that is to run it"
        expected = f"a GPU that runs code for {info.isa}"
        raise UnsupportedTarget(mismatch("target", expected, "none or another", advice))
    missing = missing_features(frozenset(manifest["features"]))
    if missing or not runs_here(info):
        lacking = f"one without {', '.join(missing)}" if missing else "another"
        advice = "compile the model for it with target='llvm -mcpu=...' and save it again"
        raise UnsupportedTarget(
            mismatch("target", f"a CPU that runs code for {info.mcpu}", lacking, advice)
        )
    return info
