"""Compiled code that compares a call's tensors with those of calls before, and launches the CUDA
graph that was recorded of such a call at these addresses.

It runs on the host. The driver launches a graph in a fraction of what its kernels take one by one.
"""

from __future__ import annotations

MOST_TENSORS, MOST_RANK = 10, 6  # of one call, and of one tensor
HASH, STREAM, FIRST = range(3)  # words of a call: of all others, its stream, and of its tensors
MOST_WORDS = FIRST + MOST_TENSORS * (2 + MOST_RANK)  # that tell a call from others
GRAPHS, NEAR = 256, 8  # of one call, each for addresses of its own, of which so many share places
MOST_GRAPHS = 1024  # of a process: each takes 115 KiB of the device and 28 of the host
OFTEN = 6  # times that addresses come before they get a graph, which takes as long as tens of calls
MOST_FAILURES = 8  # graphs of a call that could not be made, be it for what other threads did
NONE, OTHERS = -1, -2  # results; OTHERS - i: call i, which others compute
WORDS, COUNT, BEGIN, END, DROP = -3, -4, -5, -6, -7  # what is asked for: see SOURCE
DUE = 1 << 20  # added to the size of a result: the caller is to look at the call's plan

_CONSTANTS = f"""
enum {{ MOST_TENSORS = {MOST_TENSORS}, MOST_RANK = {MOST_RANK}, MOST_WORDS = {MOST_WORDS} }};
enum {{ HASH = {HASH}, STREAM = {STREAM}, FIRST = {FIRST} }};
enum {{ GRAPHS = {GRAPHS}, NEAR = {NEAR}, MOST_GRAPHS = {MOST_GRAPHS}, OFTEN = {OFTEN} }};
enum {{ MOST_FAILURES = {MOST_FAILURES}, NONE = {NONE}, OTHERS = {OTHERS}, DUE = {DUE} }};
enum {{ WORDS = {WORDS}, COUNT = {COUNT}, BEGIN = {BEGIN}, END = {END}, DROP = {DROP} }};
"""
SOURCE = (
    _CONSTANTS
    + """
#include <atomic>
#include <cuda_runtime.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

// What a call launches at these addresses: ``made`` after they came OFTEN times. Other addresses
// that want its place make it count backwards, until it is launched again: layers in turn that are
// more than the places keep the graphs that they have.
struct Graph {
  char* data[MOST_TENSORS];
  int64_t seen;
  cudaGraphExec_t made;
};

// A call in words, which tell its tensors. Every ``period``-th, unless that is 0, is not repeated.
// After ``calm`` more calls each one is DUE, until the caller says otherwise. ``dense``: others
// compute it. Last is what recording needs: the graph's place, a stream of its own, and the mode of
// the thread before.
struct Call {
  int64_t bytes, period, left, calm, dense, failures;
  int64_t words[MOST_WORDS];
  char* data[MOST_TENSORS];  // addresses of the tensors of the last call
  Graph graphs[GRAPHS];
  Graph* place;
  cudaStream_t own;
  int64_t mode;
};
// Calls, each beside the hash of its words.
struct Table {
  int64_t size;
  struct { int64_t hash; Call* call; } known[];
};

static std::atomic<int> pit_graphs{0};  // of all threads

static int64_t pit_hash(const int64_t* words, int size) {
  uint64_t hash = 0;
  for (int i = 0; i < size; ++i) hash = (hash ^ (uint64_t)words[i]) * 0x9E3779B97F4A7C15u;
  return hash;
}

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
  int at = FIRST, known = 0;
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
      words[STREAM] = (int64_t)TVMFFIEnvGetStream(x->device.device_type, x->device.device_id);
    at += size;
  }
  for (int i = 0; data[number - 1] && i < number - 1; ++i)
    if (data[i] && data[number - 1] < data[i] + bytes[i] &&
        data[i] < data[number - 1] + bytes[number - 1])
      return -1;
  words[HASH] = pit_hash(words + STREAM, at - STREAM);
  return at;
}

static void pit_drop(Graph* graph) {
  if (graph->made) {
    cudaGraphExecDestroy(graph->made);
    --pit_graphs;
  }
  memset(graph, 0, sizeof(Graph));
}

// The number of the CUDA device of a call; -1 for another kind of device, and one that is not the
// current one: the default stream is that of the current device.
static int pit_device(const Call* call) {
  const int64_t* first = call->words + FIRST;
  int current = -1;
  while (*first == -1) ++first;  // no tensor
  int device = *first >> 32 == kDLCUDA ? (int)(int32_t)*first : -1;
  return device < 0 || cudaGetDevice(&current) || current != device ? -1 : device;
}

// Whether the stream of a call is being recorded: its memory is the recorder's then.
static int pit_recorded(const Call* call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (!cudaStreamIsCapturing((cudaStream_t)call->words[STREAM], &status)) return status != 0;
  cudaGetLastError();  // the default stream cannot say it while another one is recorded
  return 1;
}

static int pit_is_at(const Call* call, const Graph* graph) {
  return !memcmp(graph->data, call->data, sizeof(graph->data));
}

// The graph of a call at its addresses, or else what they may have, of the places that depend on
// them: the one that has been of least use.
static Graph* pit_place(Call* call) {
  uint64_t hash = pit_hash((int64_t*)call->data, MOST_TENSORS);
  Graph* first = call->graphs + (hash >> 40) % (GRAPHS / NEAR) * NEAR;
  Graph* least = first;
  for (Graph* graph = first; graph < first + NEAR; ++graph) {
    if (pit_is_at(call, graph)) return graph;
    if (graph->seen < least->seen) least = graph;
  }
  return least;
}

// Launch the graph of a call at its addresses: whether there is one.
static int pit_launch(Call* call) {
  Graph* graph = pit_place(call);
  if (!graph->made || !pit_is_at(call, graph)) return 0;
  graph->seen = OFTEN;
  if (!cudaGraphLaunch(graph->made, (cudaStream_t)call->words[STREAM])) return 1;
  cudaGetLastError();  // it is launched one by one, which says what is wrong, if anything is
  pit_drop(graph);
  return 0;
}

// Note that a call was launched one by one: whether its addresses came often enough for a graph.
static int pit_count(Call* call) {
  Graph* graph = pit_place(call);
  call->calm = 0;  // it may have asked for what changes its plan
  if (call->dense || call->failures == MOST_FAILURES || pit_device(call) < 0) return 0;
  if (!pit_is_at(call, graph)) {
    if (--graph->seen > 0) return 0;
    pit_drop(graph);
    memcpy(graph->data, call->data, sizeof(graph->data));
  }
  if (graph->seen < OFTEN) ++graph->seen;
  return graph->seen == OFTEN && !graph->made && pit_graphs < MOST_GRAPHS;
}

// The stream on which to launch a call again, to record it; NULL where that cannot be. The caller's
// stream may be the default one, which no graph records, and other threads may record too.
static cudaStream_t pit_begin(Call* call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  call->place = pit_place(call);
  call->own = NULL;
  cudaThreadExchangeStreamCaptureMode(&mode);
  call->mode = mode;
  if (!cudaStreamCreateWithFlags(&call->own, cudaStreamNonBlocking)) {
    if (!cudaStreamBeginCapture(call->own, cudaStreamCaptureModeRelaxed)) return call->own;
    cudaStreamDestroy(call->own);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();
  ++call->failures;
  return NULL;
}

// End the recording: the number of the graph's place if it is kept, else NONE.
static int64_t pit_end(Call* call, int64_t keep) {
  cudaStreamCaptureMode mode = (cudaStreamCaptureMode)call->mode;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t made = NULL;
  if (!cudaStreamEndCapture(call->own, &graph) && keep && cudaGraphInstantiate(&made, graph, 0))
    made = NULL;
  if (graph) cudaGraphDestroy(graph);
  cudaStreamDestroy(call->own);
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();  // that nothing was recorded is no error of the call
  call->place->made = made;
  if (!made) {
    call->place->seen = 0;
    ++call->failures;
    return NONE;
  }
  ++pit_graphs;
  return call->place - call->graphs;
}

// The number of the call in a table whose tensors are like these, which gets their addresses, and
// that of ``made``, if it is number ``only`` (NONE: whichever it is), for its output; NONE if there
// is none, or its stream is recorded.
static int64_t pit_find(Table* table, const TVMFFIAny* given, int number, const DLTensor* made,
                        int64_t only) {
  int64_t words[MOST_WORDS];
  char* data[MOST_TENSORS] = {};
  int64_t bytes = 8 * pit_words(given, number, words, data);
  for (int64_t i = 0; bytes > 0 && i < table->size; ++i) {
    if (table->known[i].hash != words[HASH]) continue;
    Call* call = table->known[i].call;
    if (call->bytes != bytes || memcmp(call->words, words, bytes)) continue;
    if (pit_device(call) >= 0 && pit_recorded(call)) return NONE;
    if (made && (only < 0 || only == i)) data[number - 1] = pit_data(made);
    memcpy(call->data, data, sizeof(data));
    return i;
  }
  return NONE;
}

// A result for a call whose work is done, or left to others.
static int64_t pit_done(Call* call, int64_t result) {
  if (--call->calm >= 0) return result;
  call->calm = 0;
  return result < 0 ? result - DUE : result + DUE;
}

// (table, guess, tensors .., made) finds the call in the table that is like this one: i if a graph
// did its work; OTHERS - i if it is dense, or lacks an output: that among the tensors, or ``made``,
// not None, for the call ``guess``; NONE if there is none, or it has to be launched one by one.
// Results of a call that is DUE are further from 0 by that. ``made`` is last, since the stream is
// known of the device of the first argument that is a tensor, and the guess may be of another one.
// (table, i, at, output): the same for call i, just found, whose tensor ``at`` is the output.
// (table, COUNT, tensors .., output): a call was launched one by one, with this output. i if it is
// to be recorded; OTHERS - i if not; NONE if it is not known.
// (call, BEGIN): the stream on which to launch it for that, 0 if it cannot be recorded.
// (call, END, keep): the place of its graph, NONE if there is none.
// (call, DROP) drops its graphs. (address, WORDS, tensors ..) writes their words, and counts them.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void* self, const TVMFFIAny* args, int size,
                                                 TVMFFIAny* result) {
  Table* table = (Table*)args[0].v_int64;
  Call* call = (Call*)table;
  int64_t asked = args[1].v_int64, found = asked, last = size - 4;
  char* data[MOST_TENSORS];
  result->type_index = kTVMFFIInt;
  result->v_int64 = NONE;
  if (asked == WORDS) result->v_int64 = pit_words(args + 2, size - 2, (int64_t*)call, data);
  if (asked == BEGIN) result->v_int64 = (int64_t)pit_begin(call);
  if (asked == END) result->v_int64 = pit_end(call, args[2].v_int64);
  for (int i = 0; asked == DROP && i < GRAPHS; ++i) pit_drop(call->graphs + i);
  if (asked == COUNT) {
    found = pit_find(table, args + 2, size - 3, pit_tensor(args + size - 1), NONE);
    if (found >= 0) result->v_int64 = pit_count(table->known[found].call) ? found : OTHERS - found;
  }
  if (asked < NONE) return 0;
  if (args[2].type_index == kTVMFFIInt) {
    last = args[2].v_int64;
    call = table->known[found].call;
    call->data[last] = pit_data(pit_tensor(args + 3));
  } else {
    found = pit_find(table, args + 2, size - 3, pit_tensor(args + size - 1), asked);
    if (found < 0) return 0;
    call = table->known[found].call;
    if (call->period && --call->left < 0) {
      call->left = call->period - 1;
      return 0;
    }
  }
  if (call->dense)
    result->v_int64 = pit_done(call, OTHERS - found);
  else if (!call->data[last])
    result->v_int64 = OTHERS - found;
  else if (pit_device(call) >= 0 && pit_launch(call))
    result->v_int64 = pit_done(call, found);
  return 0;
}
"""
)
