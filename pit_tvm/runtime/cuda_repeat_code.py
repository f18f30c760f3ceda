"""Compiled code that compares a call's tensors with those of calls before, and launches the CUDA
graph that was recorded of such a call, wherever its tensors lie now.

It runs on the host. The driver launches a graph in a fraction of what its kernels take one by one.
"""

from __future__ import annotations

from .cuda_moving_code import MOVING

MOST_TENSORS, MOST_RANK = 10, 6  # of one call, and of one tensor
HASH, STREAM, FIRST = range(3)  # words of a call: of all others, its stream, and of its tensors
MOST_WORDS = FIRST + MOST_TENSORS * (2 + MOST_RANK)  # that tell a call from others
MOST_GRAPHS = 1024  # of a process: each takes 115 KiB of the device and 28 of the host
OFTEN = 96  # calls before one is recorded, twice: that takes 2 ms, and saves 20 us or more of each
MOST_FAILURES = 8  # recordings of a call that came to nothing, be it for what other threads did
NONE, OTHERS = -1, -2  # results; OTHERS - i: call i, which others compute
WORDS, COUNT, BEGIN, END, DROP = -3, -4, -5, -6, -7  # what is asked for: see SOURCE
DUE = 1 << 20  # added to the size of a result: the caller is to look at the call's plan

_CONSTANTS = f"""
enum {{ MOST_TENSORS = {MOST_TENSORS}, MOST_RANK = {MOST_RANK}, MOST_WORDS = {MOST_WORDS} }};
enum {{ HASH = {HASH}, STREAM = {STREAM}, FIRST = {FIRST} }};
enum {{ MOST_GRAPHS = {MOST_GRAPHS}, OFTEN = {OFTEN} }};
enum {{ MOST_FAILURES = {MOST_FAILURES}, NONE = {NONE}, OTHERS = {OTHERS}, DUE = {DUE} }};
enum {{ WORDS = {WORDS}, COUNT = {COUNT}, BEGIN = {BEGIN}, END = {END}, DROP = {DROP} }};
"""
_TOP = """
#include <atomic>
#include <cuda.h>
#include <cuda_runtime.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <vector>

static std::atomic<int> pit_graphs{0};  // of all threads
"""
SOURCE = (
    _CONSTANTS
    + _TOP
    + MOVING
    + """
// A call in words, which tell its tensors. Every ``period``-th, unless that is 0, is not repeated.
// After ``calm`` more calls each one is DUE, until the caller says otherwise. ``dense``: others
// compute it. ``places``: of the tensors of the last call. ``seen``: how often it was launched one
// by one. Last is what recording needs: a stream of its own, and the mode of the thread before.
struct Call {
  int64_t bytes, period, left, calm, dense;
  int64_t words[MOST_WORDS];
  Places places;
  int64_t seen, failures;
  Graph* graph;
  cudaStream_t own;
  int64_t mode;
};
// Calls, each beside the hash of its words.
struct Table {
  int64_t size;
  struct { int64_t hash; Call* call; } known[];
};

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

static int64_t pit_bytes(const DLTensor* x) {
  int64_t bytes = x->dtype.bits / 8;
  for (int d = 0; d < x->ndim; ++d) bytes *= x->shape[d];
  return bytes;
}

// Whether elements follow each other in memory; ``turned``: where the last two dimensions are
// exchanged.
static bool pit_follows(const DLTensor* x, bool turned) {
  int64_t step = 1;
  for (int i = 0; x->strides && i < x->ndim; ++i) {
    int d = x->ndim - 1 - (turned && i < 2 ? 1 - i : i);
    if (x->shape[d] != 1 && x->strides[d] != step) return false;
    step *= x->shape[d];
  }
  return true;
}

// Device, type, rank, extents, which power of two the address is a multiple of, up to 32 (a vector,
// of which kernels ask it), and whether the last two dimensions are exchanged; -1 where elements do
// not follow each other, or have no memory.
static int pit_describe(const DLTensor* x, int64_t* words) {
  uintptr_t address = (uintptr_t)pit_data(x) | 32;
  bool turned = !pit_follows(x, false);
  if (x->ndim > MOST_RANK || (turned && (x->ndim < 2 || !pit_follows(x, true)))) return -1;
  words[0] = (int64_t)x->device.device_type << 32 | (uint32_t)x->device.device_id;
  words[1] = (int64_t)x->dtype.code << 40 | (int64_t)x->dtype.bits << 32 |
             (int64_t)x->dtype.lanes << 16 | (int64_t)x->ndim << 8 | turned << 3 |
             __builtin_ctzll(address);
  for (int d = 0; d < x->ndim; ++d) words[2 + d] = x->shape[d];
  return x->data || !pit_bytes(x) ? 2 + x->ndim : -1;
}

static bool pit_overlap(const Places* places, int i, int j) {
  const char *a = places->data[i], *b = places->data[j];
  return a && b && a < b + places->bytes[j] && b < a + places->bytes[i];
}

// The tensor before number ``i`` that begins where it does, -1 for none; -2 where it overlaps with
// one in another way, or is the ``last``, the output, and overlaps.
static int pit_shared(const Places* places, int i, bool last) {
  int found = -1;
  for (int j = i; j-- > 0;) {
    if (!pit_overlap(places, i, j)) continue;
    if (last || places->data[i] != places->data[j]) return -2;
    found = j;
  }
  return found;
}

// Words of so many tensors, of which the last is the output; -1 for a call that cannot be told by
// them, and where tensors share memory unless they begin together.
static int pit_words(const TVMFFIAny* given, int number, int64_t* words, Places* places) {
  int at = FIRST, known = 0;
  if (number > MOST_TENSORS) return -1;
  memset(places, 0, sizeof(Places));
  for (int i = 0; i < number; ++i) {
    DLTensor* x = pit_tensor(given + i);
    if (!x && given[i].type_index != kTVMFFINone) return -1;
    if (!x) {
      words[at++] = -1;
      continue;
    }
    places->data[i] = pit_data(x);
    places->bytes[i] = pit_bytes(x);
    int size = pit_describe(x, words + at), shared = pit_shared(places, i, i == number - 1);
    if (size < 0 || shared < -1) return -1;
    words[at + 1] |= (shared + 1) << 4;
    if (!known++)
      words[STREAM] = (int64_t)TVMFFIEnvGetStream(x->device.device_type, x->device.device_id);
    at += size;
  }
  words[HASH] = pit_hash(words + STREAM, at - STREAM);
  return at;
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

// Launch the graph of a call, with its tensors where they are now: whether there is one that can.
static int pit_launch(Call* call) {
  Graph* graph = call->graph;
  if (!graph || !pit_may_move(graph, call->places.data)) return 0;
  if (pit_move(graph, call->places.data) &&
      !cudaGraphLaunch(graph->made, (cudaStream_t)call->words[STREAM]))
    return 1;
  cudaGetLastError();  // it is launched one by one, which says what is wrong, if anything is
  pit_drop(graph);
  call->graph = NULL;
  ++call->failures;
  return 0;
}

// Note that a call was launched one by one: whether it is to be recorded, first for a graph, then
// because tensors lie where no recording had them.
static int pit_count(Call* call) {
  call->calm = 0;  // it may have asked for what changes its plan
  if (call->dense || call->failures == MOST_FAILURES || pit_device(call) < 0) return 0;
  if (call->seen < OFTEN && ++call->seen < OFTEN) return 0;
  return call->graph ? !pit_may_move(call->graph, call->places.data) : pit_graphs < MOST_GRAPHS;
}

// The stream on which to launch a call again, to record it; NULL where that cannot be. The caller's
// stream may be the default one, which no graph records, and other threads may record too.
static cudaStream_t pit_begin(Call* call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
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

// End the recording, which is of use if it is to be kept: whether it became the call's graph.
static int pit_end(Call* call, bool keep) {
  cudaStreamCaptureMode mode = (cudaStreamCaptureMode)call->mode;
  cudaGraph_t recorded = NULL;
  bool made = false, learned = false;
  if (cudaStreamEndCapture(call->own, &recorded)) recorded = NULL;
  if (recorded && !keep)
    cudaGraphDestroy(recorded);
  else if (recorded && call->graph)
    learned = pit_learn(call->graph, recorded, call->places.data);
  else if (recorded)
    made = (call->graph = pit_make(recorded, &call->places)) != NULL;
  cudaStreamDestroy(call->own);
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();  // that nothing was recorded is no error of the call
  call->failures += !made && !learned;
  return made;
}

// A tensor of a call lies here.
static void pit_put(Call* call, int64_t number, const DLTensor* tensor) {
  call->places.data[number] = pit_data(tensor);
  call->places.bytes[number] = pit_bytes(tensor);
}

// The number of the call in a table whose tensors are like these, which gets their addresses, and
// that of ``made``, if it is number ``only`` (NONE: whichever it is), for its output; NONE if there
// is none, or its stream is recorded.
static int64_t pit_find(Table* table, const TVMFFIAny* given, int number, const DLTensor* made,
                        int64_t only) {
  int64_t words[MOST_WORDS];
  Places places;
  int64_t bytes = 8 * pit_words(given, number, words, &places);
  for (int64_t i = 0; bytes > 0 && i < table->size; ++i) {
    if (table->known[i].hash != words[HASH]) continue;
    Call* call = table->known[i].call;
    if (call->bytes != bytes || memcmp(call->words, words, bytes)) continue;
    if (pit_device(call) >= 0 && pit_recorded(call)) return NONE;
    call->places = places;
    if (made && (only < 0 || only == i)) pit_put(call, number - 1, made);
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
// (call, END, keep): 1 if that became its graph, else 0.
// (call, DROP) drops its graph. (address, WORDS, tensors ..) writes their words, and counts them.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_main(void* self, const TVMFFIAny* args, int size,
                                                 TVMFFIAny* result) {
  Table* table = (Table*)args[0].v_int64;
  Call* call = (Call*)table;
  int64_t asked = args[1].v_int64, found = asked, last = size - 4;
  Places places;
  result->type_index = kTVMFFIInt;
  result->v_int64 = NONE;
  if (asked == WORDS) result->v_int64 = pit_words(args + 2, size - 2, (int64_t*)call, &places);
  if (asked == BEGIN) result->v_int64 = (int64_t)pit_begin(call);
  if (asked == END) result->v_int64 = pit_end(call, args[2].v_int64);
  if (asked == DROP) pit_drop(call->graph);
  if (asked == COUNT) {
    found = pit_find(table, args + 2, size - 3, pit_tensor(args + size - 1), NONE);
    if (found >= 0) result->v_int64 = pit_count(table->known[found].call) ? found : OTHERS - found;
  }
  if (asked < NONE) return 0;
  if (args[2].type_index == kTVMFFIInt) {
    last = args[2].v_int64;
    call = table->known[found].call;
    pit_put(call, last, pit_tensor(args + 3));
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
  else if (!call->places.data[last])
    result->v_int64 = OTHERS - found;
  else if (pit_device(call) >= 0 && pit_launch(call))
    result->v_int64 = pit_done(call, found);
  return 0;
}
"""
)
