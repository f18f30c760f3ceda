// What the CUDA source of a TensorIR kernel needs of CUDA, on a CPU. CTAs run one after another;
// the threads of one take turns, and change at barriers.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__  // of the one kind that is known: `buf_dyn_shmem_ptr` below

// ---- Types

#define EMULATED_VECTORS(kind, element)                                                     \
  struct alignas(2 * sizeof(element)) kind##2 { element x, y; };                            \
  struct alignas(4 * sizeof(element)) kind##4 { element x, y, z, w; };                      \
  inline kind##2 make_##kind##2(element x, element y) { return {x, y}; }                    \
  inline kind##4 make_##kind##4(element x, element y, element z, element w) {               \
    return {x, y, z, w};                                                                    \
  }
EMULATED_VECTORS(char, signed char)
EMULATED_VECTORS(uchar, unsigned char)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(ushort, unsigned short)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(uint, unsigned)
EMULATED_VECTORS(float, float)

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using half = _Float16;
using __half = half;
struct __half2 { half x, y; };
inline half __float2half(float value) { return static_cast<half>(value); }
inline half __float2half_rn(float value) { return static_cast<half>(value); }
inline float __half2float(half value) { return static_cast<float>(value); }

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float value) {  // rounds to nearest, even
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = std::isnan(value) ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
struct nv_bfloat162 { nv_bfloat16 x, y; };
inline nv_bfloat16 __float2bfloat16(float value) { return value; }
inline nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline float __bfloat162float(nv_bfloat16 value) { return value; }

inline bool __hgt(float a, float b) { return a > b; }
inline bool __hlt(float a, float b) { return a < b; }
inline float __expf(float value) { return expf(value); }

template <typename A, typename B>
inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B>
inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

// ---- The runtime's interface, as far as launchers use it

enum cudaError_t {
  cudaSuccess,
  cudaErrorCudartUnloading,
  cudaErrorInvalidConfiguration,
  cudaErrorIllegalAddress,
  cudaErrorMisalignedAddress,
  cudaErrorLaunchFailure,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t error) {
  static const char* const texts[] = {
      "no error",
      "the runtime is unloading",
      "a grid, CTA or shared memory that is too large",
      "an access outside an array in registers or shared memory",
      "a misaligned access",
      "a barrier that not all threads of a CTA reach",
  };
  return texts[error];
}
inline const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// ---- One launch

static uint3 threadIdx, blockIdx;
constexpr size_t EMULATED_SHARED = 227 << 10;  // bytes that a CTA of sm_90 may have
alignas(1024) static unsigned char buf_dyn_shmem_ptr[EMULATED_SHARED];

namespace emulated {

constexpr size_t kThreads = 1024, kStack = 128 << 10, kGrid = (1 << 16) - 1;

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Its own asynchronous copies: those not committed yet, and groups, oldest first.
struct Thread {
  ucontext_t context;
  uint3 index;
  bool done;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

static Thread threads[kThreads];
static Thread* current;
static ucontext_t scheduler;
static std::function<void()> body;
static cudaError_t fault;
static size_t most_shared = 48 << 10;

inline void barrier() { swapcontext(&current->context, &scheduler); }

// Copies land when they must, those of odd threads as soon as they may: what reads too early
// finds NaN, what is overwritten too early is lost.
inline void copy(void* to, const void* from, int bytes, bool real) {
  if (reinterpret_cast<uintptr_t>(to) % bytes) fault = cudaErrorMisalignedAddress;
  if (!real) {
    std::memset(to, 0, bytes);
    return;
  }
  if (reinterpret_cast<uintptr_t>(from) % bytes) fault = cudaErrorMisalignedAddress;
  if ((current - threads) % 2) std::memcpy(to, from, bytes);
  else current->open.push_back({to, from, bytes});
}

inline void commit_group() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

// The newest groups, ``pending`` of them, may be under way still.
inline void wait_group(size_t pending) {
  for (auto& groups = current->groups; groups.size() > pending; groups.pop_front())
    for (const Copy& each : groups.front()) std::memcpy(each.to, each.from, each.bytes);
}

inline void enter() {
  body();
  current->done = true;
}

inline void start(Thread& thread, uint3 index, char* stack) {
  thread.index = index;
  thread.done = false;
  thread.open.clear();
  thread.groups.clear();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = stack;
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = &scheduler;
  makecontext(&thread.context, enter, 0);
}

// Every thread to its next barrier, forwards and backwards by turns, until all are done.
inline void run_cta(size_t count) {
  size_t left = count;
  for (bool forward = true; left == count; forward = !forward) {
    left = 0;
    for (size_t i = 0; i < count; ++i) {
      current = &threads[forward ? i : count - 1 - i];
      threadIdx = current->index;
      swapcontext(&scheduler, &current->context);
      left += !current->done;
    }
  }
  if (left) fault = cudaErrorLaunchFailure;
}

inline cudaError_t launch(const cudaLaunchConfig_t& config) {
  const dim3 grid = config.gridDim, cta = config.blockDim;
  const size_t count = size_t{cta.x} * cta.y * cta.z, shared = config.dynamicSmemBytes;
  if (count > kThreads || grid.y > kGrid || grid.z > kGrid || shared > most_shared)
    return cudaErrorInvalidConfiguration;
  const std::unique_ptr<char[]> stacks(new char[count * kStack]);
  fault = cudaSuccess;
  for (size_t at = 0; at < size_t{grid.x} * grid.y * grid.z && fault == cudaSuccess; ++at) {
    const unsigned row = at / grid.x;
    blockIdx = {static_cast<unsigned>(at % grid.x), row % grid.y, row / grid.y};
    std::memset(buf_dyn_shmem_ptr, 0xff, EMULATED_SHARED);  // NaN, in floating-point types
    for (unsigned i = 0; i < count; ++i)
      start(threads[i], {i % cta.x, i / cta.x % cta.y, i / cta.x / cta.y}, &stacks[i * kStack]);
    run_cta(count);
    const auto* end = buf_dyn_shmem_ptr + EMULATED_SHARED;
    if (std::any_of(buf_dyn_shmem_ptr + shared, end, [](int byte) { return byte != 0xff; }))
      fault = cudaErrorIllegalAddress;
  }
  return fault;
}

}  // namespace emulated

#define __syncthreads() emulated::barrier()

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, size_t bytes) {
  if (bytes > EMULATED_SHARED) return cudaErrorInvalidConfiguration;
  emulated::most_shared = std::max(emulated::most_shared, bytes);
  return cudaSuccess;
}

template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Params... args) {
  emulated::body = [=] { kernel(args...); };
  return emulated::launch(*config);
}

// What -fsanitize=alignment,bounds calls.
extern "C" __attribute__((visibility("hidden"))) inline void __ubsan_handle_type_mismatch_v1(
    void*, void*) {
  emulated::fault = cudaErrorMisalignedAddress;
}
extern "C" __attribute__((visibility("hidden"))) inline void __ubsan_handle_out_of_bounds(
    void*, void*) {
  emulated::fault = cudaErrorIllegalAddress;
}

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
