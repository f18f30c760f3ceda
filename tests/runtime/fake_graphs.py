"""The compiled code of repeated calls, whose CUDA runtime launches nothing: for CPU tensors, or for
those of `fake_devices`."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_repeat
from pit_tvm.runtime.cuda_build import compile_source
from pit_tvm.runtime.cuda_repeat_code import SOURCE

# Graphs are numbers, from 1 on. The log counts what was launched, made and dropped, and keeps the
# number of the last one that was launched, and its stream.
_FAKE = """
#include <stdint.h>
typedef struct FakeThing *fakeStream_t, *fakeGraph_t, *fakeGraphExec_t;
enum fakeStreamCaptureMode { fakeStreamCaptureModeRelaxed };
enum fakeStreamCaptureStatus { fakeStreamCaptureStatusNone };
enum { fakeStreamNonBlocking };
static int64_t pit_log[5];
static int pit_current = 0;
static int fakeGraphLaunch(fakeGraphExec_t made, fakeStream_t stream) {
  ++pit_log[0], pit_log[3] = (int64_t)made, pit_log[4] = (int64_t)stream;
  return 0;
}
static int fakeGraphInstantiate(fakeGraphExec_t* made, fakeGraph_t, int) {
  *made = (fakeGraphExec_t)++pit_log[1];
  return 0;
}
static int fakeGraphExecDestroy(fakeGraphExec_t) { ++pit_log[2]; return 0; }
static int fakeGraphDestroy(fakeGraph_t) { return 0; }
static int fakeGetDevice(int* device) { return *device = pit_current, 0; }
static int fakeGetLastError() { return 0; }
static int fakeThreadExchangeStreamCaptureMode(fakeStreamCaptureMode*) { return 0; }
static int fakeStreamIsCapturing(fakeStream_t, fakeStreamCaptureStatus*) { return 0; }
static int fakeStreamCreateWithFlags(fakeStream_t* stream, int) {
  *stream = (fakeStream_t)1;
  return 0;
}
static int fakeStreamBeginCapture(fakeStream_t, fakeStreamCaptureMode) { return 0; }
static int fakeStreamEndCapture(fakeStream_t, fakeGraph_t*) { return 0; }
static int fakeStreamDestroy(fakeStream_t) { return 0; }
"""
_LOG = """
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_log(void* self, const TVMFFIAny* args, int size,
                                                TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = pit_log[args[0].v_int64];
  return 0;
}
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_turn_to(void* self, const TVMFFIAny* args, int size,
                                                    TVMFFIAny* result) {
  pit_current = (int)args[0].v_int64;
  result->type_index = kTVMFFINone;
  return 0;
}
"""
LAUNCHED, MADE, DROPPED, LAST, STREAM = range(5)


def fake_graphs(device: str = "kDLCPU") -> Any:
    """Its module: ``main`` as that of `CudaRepeats`, for tensors of a kind of ``device``;
    ``log(what)``; and ``turn_to(number)``, which makes a device the current one."""
    source = re.sub(r"\bcuda([A-Z]\w+)", r"fake\1", SOURCE).replace("kDLCUDA", device)
    return compile_source(_FAKE + source + _LOG).mod


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls record as if on a stream of CUDA's, which nobody else records."""

    @contextlib.contextmanager
    def recording(stream: int) -> Any:
        yield SimpleNamespace(memory=[], is_complete=lambda most: True)

    monkeypatch.setattr(cuda_repeat, "recording", recording)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    monkeypatch.setattr(cuda_repeat, "is_rehearsed", lambda: False)
