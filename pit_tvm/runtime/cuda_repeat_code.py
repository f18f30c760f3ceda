"""Compiled code that compares a call's tensors with those of calls before, and launches.

It runs on the host. What it launches are compiled functions; of calls that come again at the same
addresses they are recorded into a CUDA graph, which the driver launches in a quarter of the time.
"""

from __future__ import annotations

MOST_TENSORS, MOST_RANK = 8, 6  # of one call, and of one tensor
MOST_WORDS = 1 + MOST_TENSORS * (2 + MOST_RANK)  # that tell a call from others
NUMBER, MEMORY, TENSOR = 0, 1, 2  # kinds of arguments: see SOURCE
GRAPHS = 16  # of one call, each for addresses of its own
MOST_GRAPHS = 256  # of a process: each takes 115 KiB of the device and 28 of the host
OFTEN = 6  # times that addresses come before they get a graph, which takes 0.1 to 0.3 ms to make

_LIMITS = f"""
enum {{ MOST_TENSORS = {MOST_TENSORS}, MOST_RANK = {MOST_RANK}, MOST_WORDS = {MOST_WORDS} }};
enum {{ MOST_ARGUMENTS = 16, GRAPHS = {GRAPHS} }};
enum {{ MOST_GRAPHS = {MOST_GRAPHS}, OFTEN = {OFTEN} }};
"""
SOURCE = (
    _LIMITS
    + """
#include <atomic>
#include <cuda_runtime.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

// What a call launches at these addresses: ``made`` after they came OFTEN times. Other addresses in
// its place in the table make it count backwards.
struct Graph {
  char* data[MOST_TENSORS];
  int64_t seen;
  cudaGraphExec_t made;
};

// A call in words: its tensors; its launches, each the function's handle, the number of arguments,
// and two words for each argument, kind and value: 0 a number, 1 memory (DLTensor), 2 + i memory as
// the value says (DLTensor) at the address of tensor i.
struct Call {
  int64_t bytes, launches;
  int64_t* program;
  int64_t words[MOST_WORDS];
  char* data[MOST_TENSORS];  // addresses of the tensors of the last call
  Graph graphs[GRAPHS];
};
struct Table { int64_t size; Call* calls[]; };

static std::atomic<int> pit_graphs{0};  // of all threads

static DLTensor* pit_tensor(const TVMFFIAny* given) {
  if (given->type_index == kTVMFFIDLTensorPtr) return (DLTensor*)given->v_ptr;
  if (given->type_index == kTVMFFITensor) return TVMFFITensorGetDLTensorPtr(given->v_obj);
  return NULL;
}

static char* pit_data(const DLTensor* x) { return (char*)x->data + x->byte_offset; }

// Device, type, rank, extents, and whether the address is a multiple of 16 bytes; -1 where elements
// do not follow each other, or have no memory. ``bytes`` gets the size.
static int pit_describe(const DLTensor* x, int64_t* words, int64_t* bytes) {
  int64_t step = 1;
  if (x->ndim > MOST_RANK) return -1;
  words[0] = (int64_t)x->device.device_type << 32 | (uint32_t)x->device.device_id;
  words[1] = (int64_t)x->dtype.code << 40 | (int64_t)x->dtype.bits << 32 |
             (int64_t)x->dtype.lanes << 16 | (int64_t)x->ndim << 8 |
             (((uintptr_t)pit_data(x) & 15) == 0);
  for (int d = x->ndim - 1; d >= 0; --d) {
    if (x->strides && x->shape[d] != 1 && x->strides[d] != step) return -1;
    step *= words[2 + d] = x->shape[d];
  }
  *bytes = step * x->dtype.bits / 8;
  if (!x->data && *bytes) return -1;
  return 2 + x->ndim;
}

// Words of so many tensors, of which the last is the output; -1 for a call that cannot be told by
// them, and where the output shares memory with another.
static int pit_words(const TVMFFIAny* given, int number, int64_t* words, char** data) {
  int at = 1, known = 0;
  int64_t bytes[MOST_TENSORS];
  if (number > MOST_TENSORS) return -1;
  for (int i = 0; i < number; ++i) {
    DLTensor* x = pit_tensor(given + i);
    data[i] = x ? pit_data(x) : NULL;
    if (!x && given[i].type_index != kTVMFFINone) return -1;
    if (!x) {
      words[at++] = -1;
      continue;
    }
    int size = pit_describe(x, words + at, bytes + i);
    if (size < 0) return -1;
    if (!known++)
      words[0] = (int64_t)TVMFFIEnvGetStream(x->device.device_type, x->device.device_id);
    at += size;
  }
  for (int i = 0; data[number - 1] && i < number - 1; ++i)
    if (data[i] && data[number - 1] < data[i] + bytes[i] &&
        data[i] < data[number - 1] + bytes[number - 1])
      return -1;
  return at;
}

static int pit_launch(const Call* call) {
  const int64_t* next = call->program;
  for (int i = 0; i < call->launches; ++i) {
    TVMFFIAny args[MOST_ARGUMENTS] = {}, result = {};
    DLTensor views[MOST_ARGUMENTS];
    void* function = (void*)*next++;
    int number = (int)*next++;
    for (int a = 0; a < number; ++a, next += 2) {
      args[a].type_index = next[0] == 0 ? kTVMFFIInt : kTVMFFIDLTensorPtr;
      args[a].v_int64 = next[1];
      if (next[0] >= 2) {
        views[a] = *(const DLTensor*)next[1];
        views[a].data = call->data[next[0] - 2];
        args[a].v_ptr = views + a;
      }
    }
    int code = TVMFFIFunctionCall(function, args, number, &result);
    if (code) return code;
  }
  return 0;
}

// What a call launches at its last addresses, on the current device, as a graph; NULL where it
// cannot be recorded. The caller's stream may be the default one, which no graph records, and other
// threads may record too.
static cudaGraphExec_t pit_record(const Call* call, int device) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaGraphExec_t made = NULL;
  cudaGraph_t graph = NULL;
  cudaStream_t own = NULL;
  TVMFFIStreamHandle stream = NULL;
  if (++pit_graphs > MOST_GRAPHS) {
    --pit_graphs;
    return NULL;
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (!cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking)) {
    if (!cudaStreamBeginCapture(own, cudaStreamCaptureModeRelaxed)) {
      int failed = TVMFFIEnvSetStream(kDLCUDA, device, own, &stream);
      if (!failed) {
        failed = pit_launch(call);
        TVMFFIEnvSetStream(kDLCUDA, device, stream, NULL);
      }
      if (!cudaStreamEndCapture(own, &graph) && !failed && cudaGraphInstantiate(&made, graph, 0))
        made = NULL;
      if (graph) cudaGraphDestroy(graph);
    }
    cudaStreamDestroy(own);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();  // that nothing was recorded is no error of the call
  if (!made) --pit_graphs;
  return made;
}

static void pit_drop(Graph* graph) {
  if (graph->made) {
    cudaGraphExecDestroy(graph->made);
    --pit_graphs;
  }
  memset(graph, 0, sizeof(Graph));
}

// The number of the CUDA device of a call; -1 for another kind of device.
static int pit_device(const Call* call) {
  const int64_t* first = call->words + 1;
  while (*first == -1) ++first;  // no tensor
  return *first >> 32 == kDLCUDA ? (int)(int32_t)*first : -1;
}

// Whether the stream of a call is being recorded: its memory is the recorder's then.
static int pit_recorded(const Call* call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (pit_device(call) < 0) return 0;
  if (!cudaStreamIsCapturing((cudaStream_t)call->words[0], &status)) return status != 0;
  cudaGetLastError();  // the default stream cannot say it while another one is recorded
  return 1;
}

// Launch a call at its addresses: by a graph where they have one. The default stream is that of the
// current device, so on another one nothing is recorded. A call without launches is the caller's.
static int pit_run(Call* call) {
  uint64_t hash = 0;
  int device = pit_device(call), current = -1;
  if (!call->launches) return 0;
  if (device < 0 || cudaGetDevice(&current) || current != device) return pit_launch(call);
  for (int i = 0; i < MOST_TENSORS; ++i)
    hash = (hash ^ (uint64_t)call->data[i]) * 0x9E3779B97F4A7C15u;
  Graph* graph = call->graphs + (hash >> 40) % GRAPHS;
  if (memcmp(graph->data, call->data, sizeof(graph->data))) {
    if (--graph->seen > 0) return pit_launch(call);
    pit_drop(graph);
    memcpy(graph->data, call->data, sizeof(graph->data));
  }
  if (graph->seen < OFTEN && ++graph->seen == OFTEN && !graph->made)
    graph->made = pit_record(call, device);
  if (graph->made) {
    if (!cudaGraphLaunch(graph->made, (cudaStream_t)call->words[0])) return 0;
    pit_drop(graph);
  }
  return pit_launch(call);  // which says what is wrong, if anything is
}

// (table, guess, made, tensors ..) finds the number of the call in the table that is like this one,
// -1 if none is or its stream is recorded, and launches what it launches if there is an output:
// among the tensors, or ``made``, not None, for the call whose number is ``guess``.
// (table, number, at, output) launches a call that was just found without an output, which is its
// tensor number ``at``. (0, address, tensors ..) writes their words to the address, and counts them.
// (call, -2) drops its graphs.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void* self, const TVMFFIAny* args, int size,
                                                 TVMFFIAny* result) {
  int64_t words[MOST_WORDS], found = args[1].v_int64;
  char* data[MOST_TENSORS];
  const Table* table = (const Table*)args[0].v_int64;
  result->type_index = kTVMFFIInt;
  if (!table) {
    result->v_int64 = pit_words(args + 2, size - 2, (int64_t*)found, data);
    return 0;
  }
  result->v_int64 = found;
  if (found == -2) {
    for (int i = 0; i < GRAPHS; ++i) pit_drop(((Call*)args[0].v_int64)->graphs + i);
    return 0;
  }
  if (args[2].type_index == kTVMFFIInt) {
    table->calls[found]->data[args[2].v_int64] = pit_data(pit_tensor(args + 3));
    return pit_run(table->calls[found]);
  }
  const DLTensor* made = pit_tensor(args + 2);
  result->v_int64 = -1;
  int64_t bytes = 8 * pit_words(args + 3, size - 3, words, data);
  for (int64_t i = 0; bytes > 0 && i < table->size; ++i) {
    Call* call = table->calls[i];
    if (call->bytes != bytes || memcmp(call->words, words, bytes)) continue;
    if (pit_recorded(call)) break;
    result->v_int64 = i;
    if (made && i == found) data[size - 4] = pit_data(made);
    memcpy(call->data, data, (size - 3) * sizeof(char*));
    return data[size - 4] ? pit_run(call) : 0;
  }
  return 0;
}
"""
)
