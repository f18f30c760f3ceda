// What the CUDA source of a TensorIR kernel needs of CUDA, on a CPU. CTAs run one after another;
// the threads of one take turns, and change where they wait for each other. What no kernel has
// types for is in cuda_emulation.cpp, which is compiled once for all kernels.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <type_traits>
#include <vector>

#define CUDART_INF_F INFINITY
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
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
struct alignas(4) __half2 { half x, y; };
using half2 = __half2;
inline half __float2half(float value) { return static_cast<half>(value); }
inline half __float2half_rn(float value) { return static_cast<half>(value); }
inline float __half2float(half value) { return static_cast<float>(value); }
inline half2 __float22half2_rn(float2 both) { return {half(both.x), half(both.y)}; }
inline float2 __half22float2(half2 both) { return {float(both.x), float(both.y)}; }

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
using __nv_bfloat16 = nv_bfloat16;
struct alignas(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
inline nv_bfloat16 __float2bfloat16(float value) { return value; }
inline nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline float __bfloat162float(nv_bfloat16 value) { return value; }
inline nv_bfloat162 __float22bfloat162_rn(float2 both) { return {both.x, both.y}; }
inline float2 __bfloat1622float2(nv_bfloat162 both) { return {both.x, both.y}; }

inline bool __hgt(float a, float b) { return a > b; }
inline bool __hlt(float a, float b) { return a < b; }
template <typename T>
inline T atomicAdd(T* at, T value) {  // threads take turns
  const T before = *at;
  *at += value;
  return before;
}
inline float __expf(float value) { return expf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline half __ushort_as_half(unsigned short bits) {
  half value;
  std::memcpy(&value, &bits, 2);
  return value;
}

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
  cudaErrorInvalidDevice,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;  // launches follow each other here in any case
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t error) {
  static const char* const texts[] = {
      "no error",
      "the runtime is unloading",
      "a grid, CTA or shared memory that is too large",
      "an access outside an array in registers or shared memory",
      "a misaligned access",
      "a barrier that not all threads reach",
      "a device that there is not",
  };
  return texts[error];
}
inline const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// ---- One launch

// Every kernel's library has these of its own.
#pragma GCC visibility push(hidden)

extern uint3 threadIdx, blockIdx;
constexpr size_t EMULATED_SHARED = 227 << 10;  // bytes that a CTA of sm_90 may have
alignas(1024) extern unsigned char buf_dyn_shmem_ptr[EMULATED_SHARED];

namespace emulated {

constexpr size_t kThreads = 1024, kWarp = 32, kStack = 128 << 10, kGrid = (1 << 16) - 1;
enum Waiting { kForWarp, kForCta, kForever };  // a thread that is done waits forever

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// A thread's share of an asynchronous product of its warpgroup: two rows of 16 deep on the left, by
// descriptors or as floats, and where sums lie, of columns `j * 8 + lane % 4 * 2 + e`.
struct Product {
  std::vector<float*> sums;
  float left[2][16];
  uint64_t left_at, right_at;
  bool held, left_turned, right_turned, fresh, wide_range;
};

// Its own asynchronous copies: those not committed yet, and groups, oldest first. Its products:
// those not committed yet, and the others.
struct Thread {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it waits
  bool entered;
  uint3 index;
  Waiting waiting;
  bool odd;  // of how many times it met its warp
  uint32_t sent[2][6];  // what the warp may read, at this time and the last
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  std::vector<Product> begun, committed;
};

extern Thread threads[kThreads];
extern Thread* current;
extern size_t most_shared;

void wait(Waiting what);
void fail(cudaError_t error);
cudaError_t launch(const cudaLaunchConfig_t& config, void (*call)(void*), void* given);

// The functions that stand for PTX.
void copy(unsigned at, const void* from, int bytes, bool real = true, int = 0);
void copy16_or_zero(unsigned at, const void* from, int bytes);
void copy16_from(unsigned at, long long from, int place, int least);
void copy4(unsigned at, const void* from);
void commit_group();
void wait_group(size_t pending);
void move(long long& number, const void* address);
unsigned shared_place(const void* address);
void load_shared(uint32_t& value, unsigned at);
void load4_if(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at, int lives);
void load4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at);
void store4(const void* at, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void add4(float* at, float a, float b, float c, float d);
void round_to_tf32(uint32_t& rounded, float value);
void exp2(float& power, float value);
void log2(float& exponent, float value);
void reciprocal(float& inverse, float value);
void commit_products();
void settle_products();
template <bool transposed>
void ldmatrix(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, unsigned at);
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
         uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3);

// Launches follow one another here.
inline void await_predecessor() {}
inline void let_successor_in() {}
inline void fence() {}

// The second one comes first in memory.
template <typename T>
inline void pack(uint32_t& word, float upper, float lower) {
  T both[2] = {T(lower), T(upper)};
  memcpy(&word, both, 4);
}

// Words of every lane of a warp: all lanes show theirs, then any may look.
class Warp {
 public:
  template <typename... Words>
  explicit Warp(Words... words) : turn_(current->odd = !current->odd) {
    const uint32_t own[] = {words...};
    std::memcpy(current->sent[turn_], own, sizeof own);
    wait(kForWarp);
    first_ = current - (current - threads) % kWarp;
  }
  int lane() const { return current - first_; }
  uint32_t operator()(int lane, int word) const { return first_[lane].sent[turn_][word]; }

 private:
  const bool turn_;
  const Thread* first_;
};

// Operands: sums, four words of the left side or its descriptor, the other descriptor, whether sums
// are added to.
void multiply(const void* const* at, size_t given, bool left_turned, bool right_turned,
              bool wide_range);

template <typename T, typename... Operands>
void wgmma(bool left_turned, bool right_turned, Operands&... operands) {
  const void* const at[] = {&operands...};
  const bool wide_range = std::is_same<T, nv_bfloat16>::value;
  multiply(at, sizeof...(operands), left_turned, right_turned, wide_range);
}

template <typename T, typename... Operands>
void wgmma_held(bool right_turned, Operands&... operands) {
  wgmma<T>(false, right_turned, operands...);
}

}  // namespace emulated

#pragma GCC visibility pop

inline int __shfl_sync(unsigned, int value, int lane, int) {
  return emulated::Warp(static_cast<uint32_t>(value))(lane, 0);
}

inline float __shfl_sync(unsigned, float value, int lane, int) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return __uint_as_float(emulated::Warp(bits)(lane, 0));
}

inline int __shfl_up_sync(unsigned, int value, unsigned delta, int) {
  const emulated::Warp warp(static_cast<uint32_t>(value));
  const int lane = threadIdx.x % 32, other = lane - static_cast<int>(delta);
  return other < 0 ? value : warp(other, 0);
}

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int mask, int) {
  return emulated::Warp(value)(threadIdx.x % 32 ^ mask, 0);
}

inline float __shfl_xor_sync(unsigned, float value, int mask, int) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return __uint_as_float(emulated::Warp(bits)(threadIdx.x % 32 ^ mask, 0));
}

inline void __threadfence() {}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __clz(int word) { return word ? __builtin_clz(word) : 32; }

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (uint64_t{high} << 32 | low) >> shift % 32;
}

template <typename T>
T __ldg(const T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) emulated::fail(cudaErrorMisalignedAddress);
  return *at;
}
template <typename T>
T __ldcs(const T* at) {
  return __ldg(at);
}

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const emulated::Warp warp(static_cast<uint32_t>(value));
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= warp(lane, 0);
  return all;
}

inline unsigned __ballot_sync(unsigned, int pred) {
  const emulated::Warp warp(static_cast<uint32_t>(pred != 0));
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= warp(lane, 0) << lane;
  return votes;
}

#define __syncthreads() emulated::wait(emulated::kForCta)
#define __syncwarp() emulated::wait(emulated::kForWarp)
#define __cvta_generic_to_shared(address) emulated::shared_place(address)

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, size_t bytes) {
  if (bytes > EMULATED_SHARED) return cudaErrorInvalidConfiguration;
  emulated::most_shared = std::max(emulated::most_shared, bytes);
  return cudaSuccess;
}

template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Params... args) {
  auto call = [&] { kernel(args...); };
  using Call = decltype(call);
  return emulated::launch(*config, [](void* own) { (*static_cast<Call*>(own))(); }, &call);
}
