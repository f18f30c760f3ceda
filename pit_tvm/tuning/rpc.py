"""Candidates on other machines: sessions from TVM's RPC tracker.

Whoever reaches a tracker or a server can run any code on it: use them in trusted networks only.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import tvm
from tvm.rpc.base import RPC_TRACKER_MAGIC

from ..errors import BackendUnavailable, mismatch
from .runner import OpenSession, Session

_NEEDED = ("tornado", "cloudpickle", "psutil")
_CONNECT_SECS = 5.0
_POLL_SECS = 0.02
_MOST_PORT, _DIGITS = 2**16 - 1, 5


def _require_rpc() -> None:
    """BackendUnavailable if a package is missing that TVM's tracker and servers import."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        advice = "pip install 'pit-tvm[rpc]'"
        raise BackendUnavailable(mismatch("rpc", f"the packages {_NEEDED}", missing, advice))


def rpc_sessions(tracker: str, key: str, timeout_secs: int = 60) -> OpenSession:
    """Sessions on any server that registered ``key`` with the tracker at ``"host:port"``.

    Each candidate gets a session of its own, of at most ``timeout_secs``. A candidate that crashes
    takes its server along (TVM's server ends with its session); this process goes on.

    Raises
    ------
    BackendUnavailable
        The address is malformed, no tracker answers there, or none of its servers has the key.
        The sessions raise it when for ``timeout_secs`` no server is free.
    """
    _require_rpc()
    host, port = _parse_address(tracker)
    if key not in (keys := _server_keys(host, port)):
        raise BackendUnavailable(
            mismatch("rpc key", f"a server registered under {key!r}", f"only {sorted(keys)}")
        )

    @contextmanager
    def open_session() -> Iterator[Session]:
        _wait_for_server(host, port, key, timeout_secs)
        with _tracker(host, port) as connection:
            remote = connection.request(key, session_timeout=timeout_secs, max_retry=1)

        def load(artifact: Any) -> Any:
            remote.upload(str(artifact))
            return remote.load_module(artifact.name)

        threads = remote.get_function("runtime.NumThreads")()
        yield Session(load, remote.cpu(), int(threads))

    return open_session


def _parse_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    number = int(port) if port.isdecimal() and len(port) <= _DIGITS else 0
    if not colon or not host or not 0 < number <= _MOST_PORT:
        raise BackendUnavailable(mismatch("rpc tracker", "HOST:PORT", repr(text)))
    return host, number


@contextmanager
def _tracker(host: str, port: int) -> Iterator[Any]:
    """A connection to the tracker. TVM itself would try for a minute to reach it."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECS) as probe:
            magic = struct.pack("<i", RPC_TRACKER_MAGIC)
            probe.sendall(magic)
            if probe.recv(len(magic)) != magic:
                raise OSError("the answer is not a tracker's")
        connection = tvm.rpc.connect_tracker(host, port)
    except (OSError, RuntimeError, UnicodeError) as error:  # UnicodeError: no name of a host
        raise BackendUnavailable(
            mismatch("rpc tracker", f"an answer at {host}:{port}", error)
        ) from error
    try:
        yield connection
    finally:
        connection.close()


def _server_keys(host: str, port: int) -> set[str]:
    """Keys under which servers have registered with a tracker."""
    with _tracker(host, port) as connection:
        servers = connection.summary()["server_info"]
    return {str(server["key"]).removeprefix("server:") for server in servers}


def _free_servers(host: str, port: int, key: str) -> int:
    """Servers that wait for work. A request while there are none would wait without end."""
    with _tracker(host, port) as connection:
        queue = connection.summary()["queue_info"].get(key, {})
    return int(queue.get("free", 0))


def _wait_for_server(host: str, port: int, key: str, secs: int) -> None:
    deadline = time.monotonic() + secs
    while not _free_servers(host, port, key):
        if time.monotonic() > deadline:
            expected, got = f"one with key {key!r} that is free", f"none in {secs} s"
            advice = "start it again if a candidate crashed it"
            raise BackendUnavailable(mismatch("rpc server", expected, got, advice))
        time.sleep(_POLL_SECS)
