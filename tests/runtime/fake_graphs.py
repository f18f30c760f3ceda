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

# Graphs have numbers, from 1 on. The log counts what was launched, made, dropped, recorded and
# changed, and keeps the number of the last one that was launched, and its stream. What a test
# records while a stream is captured is a kernel, whose parameters are words.
_FAKE = """
#include <cuda.h>
#include <stdint.h>
#include <string.h>
#include <vector>
typedef CUstream fakeStream_t;
typedef CUgraph fakeGraph_t;
typedef CUgraphExec fakeGraphExec_t;
typedef CUgraphNode fakeGraphNode_t;
typedef int fakeDriverEntryPointQueryResult;
enum fakeStreamCaptureMode { fakeStreamCaptureModeRelaxed };
enum fakeStreamCaptureStatus { fakeStreamCaptureStatusNone };
enum fakeGraphNodeType { fakeGraphNodeTypeKernel, fakeGraphNodeTypeOther };
enum { fakeStreamNonBlocking, fakeEnableDefault };
struct FakeNode { int64_t kind; std::vector<int64_t> words; std::vector<void*> params; };
struct FakeGraph { std::vector<FakeNode*> nodes; };
struct FakeExec { int64_t number; FakeGraph* graph; std::vector<std::vector<int64_t>> words; };
static int64_t pit_log[7];
static int pit_current = 0, pit_broken = 0;
static FakeGraph* pit_capture = NULL;
static std::vector<int64_t> pit_launched;
static int fakeGraphLaunch(fakeGraphExec_t given, fakeStream_t stream) {
  FakeExec* made = (FakeExec*)given;
  ++pit_log[0], pit_log[3] = made->number, pit_log[4] = (int64_t)stream;
  pit_launched.clear();
  for (auto& each : made->words) pit_launched.insert(pit_launched.end(), each.begin(), each.end());
  return 0;
}
static int fakeGraphInstantiate(fakeGraphExec_t* made, fakeGraph_t graph, int) {
  FakeExec* exec = new FakeExec{++pit_log[1], (FakeGraph*)graph};
  for (FakeNode* node : exec->graph->nodes) exec->words.push_back(node->words);
  *made = (fakeGraphExec_t)exec;
  return 0;
}
static int fakeGraphExecDestroy(fakeGraphExec_t made) {
  delete (FakeExec*)made;
  return ++pit_log[2], 0;
}
static int fakeGraphDestroy(fakeGraph_t graph) {
  for (FakeNode* node : ((FakeGraph*)graph)->nodes) delete node;
  delete (FakeGraph*)graph;
  return 0;
}
static int fakeGraphGetNodes(fakeGraph_t graph, fakeGraphNode_t* nodes, size_t* number) {
  FakeGraph* given = (FakeGraph*)graph;
  for (size_t i = 0; nodes && i < *number; ++i) nodes[i] = (fakeGraphNode_t)given->nodes[i];
  return *number = given->nodes.size(), 0;
}
static int fakeGraphNodeGetType(fakeGraphNode_t node, fakeGraphNodeType* type) {
  *type = ((FakeNode*)node)->kind ? fakeGraphNodeTypeKernel : fakeGraphNodeTypeOther;
  return 0;
}
// The number of parameters, and the kernel's.
static CUresult pit_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
  FakeNode* given = (FakeNode*)node;
  memset(params, 0, sizeof(*params));
  params->func = (CUfunction)(given->words.size() | given->kind << 16);
  params->kernelParams = given->params.data();
  return CUDA_SUCCESS;
}
static CUresult pit_info(CUfunction func, size_t i, size_t* offset, size_t* size) {
  *offset = 8 * i, *size = 8;
  return i < ((size_t)func & 0xffff) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult pit_set(CUgraphExec made, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
  FakeExec* exec = (FakeExec*)made;
  for (size_t i = 0; i < exec->words.size() && !pit_broken; ++i) {
    if ((FakeNode*)node != exec->graph->nodes[i]) continue;
    std::vector<int64_t>& words = exec->words[i];
    for (size_t j = 0; j < words.size(); ++j) memcpy(&words[j], params->kernelParams[j], 8);
    ++pit_log[6];
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
static CUresult pit_function(CUfunction*, CUkernel) { return CUDA_ERROR_INVALID_VALUE; }
static int fakeGetDriverEntryPointByVersion(const char* name, void** entry, int, int, int*) {
  *entry = strstr(name, "GetParams")      ? (void*)pit_params
           : strstr(name, "SetParams")    ? (void*)pit_set
           : strstr(name, "GetParamInfo") ? (void*)pit_info
                                          : (void*)pit_function;
  return 0;
}
static int fakeGetDevice(int* device) { return *device = pit_current, 0; }
static int fakeGetLastError() { return 0; }
static int fakeThreadExchangeStreamCaptureMode(fakeStreamCaptureMode*) { return 0; }
static int fakeStreamIsCapturing(fakeStream_t, fakeStreamCaptureStatus*) { return 0; }
static int fakeStreamCreateWithFlags(fakeStream_t* stream, int) {
  *stream = (fakeStream_t)1;
  return 0;
}
static int fakeStreamBeginCapture(fakeStream_t, fakeStreamCaptureMode) {
  return pit_capture = new FakeGraph, ++pit_log[5], 0;
}
static int fakeStreamEndCapture(fakeStream_t, fakeGraph_t* graph) {
  *graph = (fakeGraph_t)pit_capture;
  return pit_capture = NULL, 0;
}
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
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_break(void* self, const TVMFFIAny* args, int size,
                                                  TVMFFIAny* result) {
  pit_broken = (int)args[0].v_int64;
  result->type_index = kTVMFFINone;
  return 0;
}
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_record(void* self, const TVMFFIAny* args, int size,
                                                   TVMFFIAny* result) {
  result->type_index = kTVMFFINone;
  if (!pit_capture) return 0;
  FakeNode* node = new FakeNode{args[0].v_int64};
  for (int i = 1; i < size; ++i) {
    DLTensor* x = pit_tensor(args + i);
    node->words.push_back(x ? (int64_t)pit_data(x) : args[i].v_int64);
  }
  for (int64_t& word : node->words) node->params.push_back(&word);
  pit_capture->nodes.push_back(node);
  return 0;
}
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_launched(void* self, const TVMFFIAny* args, int size,
                                                     TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = args[0].v_int64 < 0 ? pit_launched.size() : pit_launched[args[0].v_int64];
  return 0;
}
"""
LAUNCHED, MADE, DROPPED, LAST, STREAM, RECORDED, CHANGED = range(7)


def fake_graphs(device: str = "kDLCPU") -> Any:
    """Its module: ``main`` as that of `CudaRepeats`, for tensors of a kind of ``device``;
    ``log(what)``; ``turn_to(number)``, which makes a device the current one;
    ``record(kind, words ..)``: a kernel, of kind 0 something else, with tensors and numbers as
    parameters, is recorded if anything is; ``launched(at)``: a word of the last launch, of -1 how
    many there are; ``break(1)``: the driver takes no parameters until ``break(0)``."""
    source = re.sub(r"\bcuda([A-Z]\w+)", r"fake\1", SOURCE).replace("kDLCUDA", device)
    return compile_source(_FAKE + source + _LOG).mod


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls record as if on a stream of CUDA's, which nobody else records."""

    @contextlib.contextmanager
    def recording(stream: int, before: Any) -> Any:
        yield SimpleNamespace(memory=[], is_complete=lambda most: True)

    monkeypatch.setattr(cuda_repeat, "recording", recording)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)
    monkeypatch.setattr(cuda_repeat, "is_rehearsed", lambda: False)
