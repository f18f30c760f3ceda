"""Jobs through TVM's RPC tracker, on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from pit_tvm.errors import BackendUnavailable, TuningError
from pit_tvm.threads import start_thread_pool
from pit_tvm.tile_db.store import TileStore
from pit_tvm.tuning import rpc
from pit_tvm.tuning.backend import host_backend
from pit_tvm.tuning.rpc import rpc_sessions
from pit_tvm.tuning.runner import measure
from pit_tvm.tuning.tasks import make_example
from tests.tuning.stand_in import SPACE
from tests.tuning.test_job import HOST, QUICK, TASK, make_job

KEY = "test-server"


@pytest.fixture(scope="module")
def farm() -> Iterator[str]:
    """A tracker and one server on this machine, processes of their own: the tracker's address."""
    from tvm.rpc.tracker import Tracker  # needs tornado

    start_thread_pool(HOST.threads)
    ports = {"port_end": 9290, "silent": True}
    tracker = Tracker("127.0.0.1", port=9190, **ports)
    address = ("127.0.0.1", tracker.port)
    try:
        server = tvm.rpc.Server(
            "127.0.0.1", port=tracker.port + 1, tracker_addr=address, key=KEY, **ports
        )
        try:
            deadline = time.monotonic() + 60.0
            while KEY not in rpc._server_keys(*address):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"127.0.0.1:{tracker.port}"
        finally:
            server.terminate()
    finally:
        tracker.terminate()


def test_job_runs_over_rpc_and_records_the_servers_device(farm: str, tmp_path: Path) -> None:
    sessions = rpc_sessions(farm, KEY, timeout_secs=20)
    job = make_job(tmp_path, trials=3, backend=host_backend(sessions), device=f"{KEY}-{HOST.isa}")
    result = job.run()
    assert (result.measured, result.failed) == (3, 0)
    records = TileStore.open(tmp_path / "db", device=f"{KEY}-{HOST.isa}").records()
    assert records == result.records != ()
    assert all(record.provenance.threads >= 1 for record in records)


def test_wrong_result_is_seen_over_rpc(farm: str, tmp_path: Path) -> None:
    sessions = rpc_sessions(farm, KEY, timeout_secs=20)
    space = replace(SPACE, example=doubled)
    with pytest.raises(TuningError, match="wrong result"):
        make_job(
            tmp_path, trials=1, space=space, backend=host_backend(sessions), device="x-y"
        ).run()
    assert not list((tmp_path / "db").rglob("*.json"))


def doubled(task, rng):
    """An example whose expected result is twice the right one."""
    right = make_example(SPACE, task, rng)
    return right.inputs, 2 * right.expected


def test_calibration_over_rpc_is_refused(farm: str, tmp_path: Path) -> None:
    sessions = rpc_sessions(farm, KEY)
    with pytest.raises(TuningError, match="calibrate"):
        make_job(tmp_path, trials=1, backend=host_backend(sessions), calibrate=True).run()


def test_key_without_server_is_refused(farm: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"'absent'.*{KEY}"):
        rpc_sessions(farm, "absent")


def test_session_is_not_waited_for_without_end(farm: str, tmp_path: Path) -> None:
    patient, hasty = (rpc_sessions(farm, KEY, timeout_secs=secs) for secs in (30, 1))
    example = make_example(SPACE, TASK, np.random.default_rng(0))
    with patient() as taken:
        with pytest.raises(BackendUnavailable, match="free"), hasty():
            pass
        with pytest.raises(OSError):
            measure(taken, tmp_path / "absent.tar", example, QUICK, 1.0)


@pytest.mark.parametrize("address", ["localhost", ":1", "localhost:", "localhost:port"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(BackendUnavailable, match="HOST:PORT"):
        rpc_sessions(address, KEY)


def test_address_where_no_tracker_answers_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}"):
            rpc_sessions(f"127.0.0.1:{port}", KEY)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\udcff"], ids="empty long surrogate".split())
def test_names_that_no_host_has_are_refused(host: str) -> None:
    with pytest.raises(BackendUnavailable, match="rpc tracker: expected an answer at"):
        rpc_sessions(f"{host}:9190", KEY)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        return None if name == "tornado" else object()

    monkeypatch.setattr(rpc, "find_spec", find)
    with pytest.raises(BackendUnavailable, match=r"\['tornado'\].*pit-tvm\[rpc\]"):
        rpc_sessions("127.0.0.1:9190", KEY)
