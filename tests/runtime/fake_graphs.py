"""The compiled code of repeated calls, for CPU tensors: its CUDA runtime launches nothing."""

from __future__ import annotations

import re
from typing import Any

from pit_tvm.runtime.cuda_build import compile_source
from pit_tvm.runtime.cuda_repeat_code import SOURCE

# Graphs are numbers, from 1 on. The log counts what was launched, made and dropped, and keeps the
# number of the last one that was launched.
_FAKE = """
#include <stdint.h>
typedef struct FakeThing *fakeStream_t, *fakeGraph_t, *fakeGraphExec_t;
enum fakeStreamCaptureMode { fakeStreamCaptureModeRelaxed };
enum fakeStreamCaptureStatus { fakeStreamCaptureStatusNone };
enum { fakeStreamNonBlocking };
static int64_t pit_log[4];
static int fakeGraphLaunch(fakeGraphExec_t made, fakeStream_t) {
  ++pit_log[0], pit_log[3] = (int64_t)made;
  return 0;
}
static int fakeGraphInstantiate(fakeGraphExec_t* made, fakeGraph_t, int) {
  *made = (fakeGraphExec_t)++pit_log[1];
  return 0;
}
static int fakeGraphExecDestroy(fakeGraphExec_t) { ++pit_log[2]; return 0; }
static int fakeGraphDestroy(fakeGraph_t) { return 0; }
static int fakeGetDevice(int* device) { return *device = 0; }
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
"""
LAUNCHED, MADE, DROPPED, LAST = range(4)


def fake_graphs() -> Any:
    """Its module: ``main`` as that of `CudaRepeats`, and ``log(what)``."""
    source = re.sub(r"\bcuda([A-Z]\w+)", r"fake\1", SOURCE).replace("kDLCUDA", "kDLCPU")
    return compile_source(_FAKE + source + _LOG).mod
