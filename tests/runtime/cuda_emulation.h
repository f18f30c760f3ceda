// What the CUDA source of a TensorIR kernel needs of CUDA, on a CPU. CTAs run one after another;
// the threads of one take turns, and change where they wait for each other.
#pragma once

#include <setjmp.h>
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

static uint3 threadIdx, blockIdx;
constexpr size_t EMULATED_SHARED = 227 << 10;  // bytes that a CTA of sm_90 may have
alignas(1024) static unsigned char buf_dyn_shmem_ptr[EMULATED_SHARED];

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

static Thread threads[kThreads];
static Thread* current;
static jmp_buf scheduler;
static std::function<void()> body;
static cudaError_t fault;
static size_t most_shared = 48 << 10;

// By jumps, since `swapcontext` asks the system for signals' masks every time.
inline void wait(Waiting what) {
  current->waiting = what;
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

inline void resume() {
  if (_setjmp(scheduler)) return;
  if (current->entered) _longjmp(current->place, 1);
  current->entered = true;
  setcontext(&current->context);
}

// Ends the launch, and never returns.
inline void fail(cudaError_t error) {
  fault = error;
  wait(kForever);
}

// Copies land when they must, those of odd threads as soon as they may: what reads too early
// finds NaN, what is overwritten too early is lost.
inline void copy(unsigned at, const void* from, int bytes, bool real = true, int = 0) {
  void* to = buf_dyn_shmem_ptr + at;
  if (at % bytes) fail(cudaErrorMisalignedAddress);
  if (!real) {
    std::memset(to, 0, bytes);
    return;
  }
  if (reinterpret_cast<uintptr_t>(from) % bytes) fail(cudaErrorMisalignedAddress);
  if ((current - threads) % 2) std::memcpy(to, from, bytes);
  else current->open.push_back({to, from, bytes});
}

inline void copy16_or_zero(unsigned at, const void* from, int bytes) {
  copy(at, from, 16, bytes == 16);
}

inline void move(long long& number, const void* address) {
  number = reinterpret_cast<long long>(address);
}

inline void copy16_from(unsigned at, long long from, int place, int least) {
  copy(at, reinterpret_cast<const void*>(from), 16, place >= least);
}

inline void copy4(unsigned at, const void* from) { copy(at, from, 4); }

// Launches follow one another here.
inline void await_predecessor() {}
inline void let_successor_in() {}
inline void fence() {}

inline void commit_group() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

// The newest groups, ``pending`` of them, may be under way still.
inline void wait_group(size_t pending) {
  for (auto& groups = current->groups; groups.size() > pending; groups.pop_front())
    for (const Copy& each : groups.front()) std::memcpy(each.to, each.from, each.bytes);
}

inline unsigned shared_place(const void* address) {
  return static_cast<const unsigned char*>(address) - buf_dyn_shmem_ptr;
}

inline void load_shared(uint32_t& value, unsigned at) {
  if (at % 4) fail(cudaErrorMisalignedAddress);
  std::memcpy(&value, buf_dyn_shmem_ptr + at, 4);
}

inline void load4_if(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at, int lives) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  uint32_t words[4] = {};
  if (lives) std::memcpy(words, at, sizeof words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

inline void load4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at) {
  load4_if(a, b, c, d, at, 1);
}

// The second one comes first in memory.
template <typename T>
inline void pack(uint32_t& word, float upper, float lower) {
  T both[2] = {T(lower), T(upper)};
  memcpy(&word, both, 4);
}

inline void store4(const void* at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  const uint32_t words[] = {a, b, c, d};
  std::memcpy(const_cast<void*>(at), words, sizeof words);
}

inline void add4(float* at, float a, float b, float c, float d) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  at[0] += a, at[1] += b, at[2] += c, at[3] += d;
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

// Four matrices of 8 x 8 elements of 16 bits; the lanes tell where their rows begin.
template <bool transposed>
void ldmatrix(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, unsigned at) {
  if (at % 16) fail(cudaErrorMisalignedAddress);
  const Warp warp(at);
  uint32_t* const registers[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t both[2];
    for (int i = 0; i < 2; ++i) {
      int row = warp.lane() / 4, column = warp.lane() % 4 * 2 + i;
      if (transposed) std::swap(row, column);
      std::memcpy(both + i, buf_dyn_shmem_ptr + warp(matrix * 8 + row, 0) + column * 2, 2);
    }
    std::memcpy(registers[matrix], both, 4);
  }
}

// To the nearest of ten bits behind the point, and away from 0 in between.
inline void round_to_tf32(uint32_t& rounded, float value) {
  std::memcpy(&rounded, &value, 4);
  if (std::isfinite(value)) rounded = (rounded + 0x1000u) & ~0x1fffu;
}

inline void exp2(float& power, float value) { power = std::exp2(value); }
inline void log2(float& exponent, float value) { exponent = std::log2(value); }

template <typename T>
float element(uint32_t word, int at) {
  if constexpr (sizeof(T) == 4) word &= ~0x1fffu;  // tf32 has ten bits behind the point
  T all[4 / sizeof(T)];
  std::memcpy(all, &word, 4);
  return static_cast<float>(all[at]);
}

// d [16, 8] = a [16, k] b [k, 8] + c, with 32 bytes of k: a register has rows 8 apart before the
// later half of k.
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
         uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  constexpr int each = 4 / sizeof(T), depth = 8 * each;
  const Warp warp(a0, a1, a2, a3, b0, b1);
  float sums[] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i) {
    const int row = warp.lane() / 4, column = warp.lane() % 4 * 2 + i % 2;
    for (int k = 0; k < depth; ++k) {
      const int later = k / (depth / 2), lane = k % (depth / 2) / each;
      const uint32_t a = warp(row * 4 + lane, i / 2 + 2 * later);
      const uint32_t b = warp(column * 4 + lane, 4 + later);
      sums[i] += element<T>(a, k % each) * element<T>(b, k % each);
    }
  }
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

// Where a descriptor of rows of 128 bytes has an element: a row of the depth, or turned, a column.
// Every eight of these are one stride apart; turned, 64 elements are followed by the next matrix.
inline unsigned described(uint64_t descriptor, int line, int depth, bool turned) {
  const unsigned start = (descriptor & 0x3fff) * 16, next = (descriptor >> 16 & 0x3fff) * 16;
  const unsigned eight = (descriptor >> 32 & 0x3fff) * 16;
  if (descriptor >> 62 != 1) fail(cudaErrorLaunchFailure);
  const int row = turned ? depth : line, column = turned ? line : depth;
  const unsigned at = start + column / 64 * next + row / 8 * eight + row % 8 * 128 + column % 64 * 2;
  return at ^ (at >> 7 & 7) << 4;
}

inline float number(unsigned at, bool wide_range) {
  uint16_t bits;
  std::memcpy(&bits, buf_dyn_shmem_ptr + at, 2);
  const uint32_t word = bits;
  return wide_range ? element<nv_bfloat16>(word, 0) : element<half>(word, 0);
}

inline void carry_out(const Product& product) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  float left[2][16], right[16];
  std::memcpy(left, product.left, sizeof left);
  for (int r = 0; r < 2 && !product.held; ++r)
    for (int k = 0; k < 16; ++k) {
      const int row = thread / 32 * 16 + lane / 4 + 8 * r;
      left[r][k] = number(described(product.left_at, row, k, product.left_turned), product.wide_range);
    }
  for (size_t j = 0; j < product.sums.size() / 4; ++j)
    for (int e = 0; e < 2; ++e) {
      const int column = j * 8 + lane % 4 * 2 + e;
      for (int k = 0; k < 16; ++k)
        right[k] = number(described(product.right_at, column, k, product.right_turned),
                          product.wide_range);
      for (int r = 0; r < 2; ++r) {
        float& sum = *product.sums[j * 4 + r * 2 + e];
        float total = product.fresh ? 0.0f : sum;
        for (int k = 0; k < 16; ++k) total += left[r][k] * right[k];
        sum = total;
      }
    }
}

// As copies land, products of odd threads are carried out at once, the others when they must.
inline void begin(Product product) {
  if ((current - threads) % 2) carry_out(product);
  else current->begun.push_back(std::move(product));
}

inline void commit_products() {
  auto& begun = current->begun;
  current->committed.insert(current->committed.end(), begun.begin(), begun.end());
  begun.clear();
}

inline void settle_products() {
  for (const Product& each : current->committed) carry_out(each);
  current->committed.clear();
}

// Operands: sums, four words of the left side or its descriptor, the other descriptor, whether sums
// are added to.
template <typename T, typename... Operands>
void wgmma(bool left_turned, bool right_turned, Operands&... operands) {
  const void* const at[] = {&operands...};
  const size_t given = sizeof...(operands), count = (given - 3) / 8 * 8;
  Product product{};
  for (size_t i = 0; i < count; ++i) product.sums.push_back((float*)at[i]);
  product.held = given - count == 6;
  product.left_turned = left_turned, product.right_turned = right_turned;
  product.wide_range = std::is_same<T, nv_bfloat16>::value;
  if (product.held) {
    uint32_t own[4];
    for (int i = 0; i < 4; ++i) std::memcpy(own + i, at[count + i], 4);
    const Warp warp(own[0], own[1], own[2], own[3]);
    for (int r = 0; r < 2; ++r)
      for (int k = 0; k < 16; ++k)
        product.left[r][k] =
            element<T>(warp(warp.lane() / 4 * 4 + k % 8 / 2, r + k / 8 * 2), k % 2);
  } else {
    std::memcpy(&product.left_at, at[count], 8);
  }
  std::memcpy(&product.right_at, at[given - 2], 8);
  product.fresh = *(const int*)at[given - 1] == 0;
  begin(std::move(product));
}

template <typename T, typename... Operands>
void wgmma_held(bool right_turned, Operands&... operands) {
  wgmma<T>(false, right_turned, operands...);
}

inline void enter() {
  body();
  wait(kForever);
}

inline void start(Thread& thread, uint3 index, char* stack) {
  thread.entered = false;
  thread.index = index;
  thread.open.clear();
  thread.groups.clear();
  thread.begun.clear();
  thread.committed.clear();
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = stack;
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = nullptr;  // it never returns
  makecontext(&thread.context, enter, 0);
}

// Runs threads ``begin`` to ``end`` until they wait, forwards or backwards; what they all wait for.
inline Waiting run(size_t begin, size_t end, bool forward) {
  for (size_t i = begin; i < end && fault == cudaSuccess; ++i) {
    current = &threads[forward ? i : begin + end - 1 - i];
    threadIdx = current->index;
    resume();
  }
  for (size_t i = begin; i < end && fault == cudaSuccess; ++i)
    if (threads[i].waiting != threads[begin].waiting) fault = cudaErrorLaunchFailure;
  return threads[begin].waiting;
}

// Every warp to its next barrier, forwards and backwards by turns, until all are done.
inline void run_cta(size_t count) {
  Waiting all = kForCta;
  for (bool forward = true; all == kForCta && fault == cudaSuccess; forward = !forward) {
    for (size_t i = 0; i < count && fault == cudaSuccess; i += kWarp) {
      const size_t begin = forward ? i : (count - 1 - i) / kWarp * kWarp;
      const size_t end = std::min(begin + kWarp, count);
      Waiting warp;
      do warp = run(begin, end, forward);
      while (warp == kForWarp && fault == cudaSuccess);
      if (i && warp != all && fault == cudaSuccess) fault = cudaErrorLaunchFailure;
      all = warp;
    }
  }
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
    // Behind what was asked for, each byte is the one before; `memcmp` is quick without -O.
    const auto* rest = buf_dyn_shmem_ptr + shared;
    const size_t size = EMULATED_SHARED - shared;
    if (fault == cudaSuccess && size && (*rest != 0xff || std::memcmp(rest, rest + 1, size - 1)))
      fault = cudaErrorIllegalAddress;
  }
  return fault;
}

}  // namespace emulated

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
  emulated::body = [=] { kernel(args...); };
  return emulated::launch(*config);
}

// What -fsanitize=alignment,bounds calls.
#pragma GCC visibility push(hidden)
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) {
  emulated::fail(cudaErrorMisalignedAddress);
}
extern "C" void __ubsan_handle_out_of_bounds(void*, void*) {
  emulated::fail(cudaErrorIllegalAddress);
}
#pragma GCC visibility pop
