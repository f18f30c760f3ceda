// How the threads of a CTA take turns, and what PTX does: what is in cuda_emulation.h for every
// kernel, and compiled once.
#include "cuda_emulation.h"

#include <memory>

uint3 threadIdx, blockIdx;
alignas(1024) unsigned char buf_dyn_shmem_ptr[EMULATED_SHARED];

namespace emulated {

Thread threads[kThreads];
Thread* current;
size_t most_shared = 48 << 10;
static jmp_buf scheduler;
static void (*body)(void*);
static void* argument;
static cudaError_t fault;

// By jumps, since `swapcontext` asks the system for signals' masks every time.
void wait(Waiting what) {
  current->waiting = what;
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

static void resume() {
  if (_setjmp(scheduler)) return;
  if (current->entered) _longjmp(current->place, 1);
  current->entered = true;
  setcontext(&current->context);
}

// Ends the launch, and never returns.
void fail(cudaError_t error) {
  fault = error;
  wait(kForever);
}

// Copies land when they must, those of odd threads as soon as they may: what reads too early
// finds NaN, what is overwritten too early is lost.
void copy(unsigned at, const void* from, int bytes, bool real, int) {
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

void copy16_or_zero(unsigned at, const void* from, int bytes) {
  copy(at, from, 16, bytes == 16);
}

void move(long long& number, const void* address) {
  number = reinterpret_cast<long long>(address);
}

void copy16_from(unsigned at, long long from, int place, int least) {
  copy(at, reinterpret_cast<const void*>(from), 16, place >= least);
}

void copy4(unsigned at, const void* from) { copy(at, from, 4); }

void commit_group() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}

// The newest groups, ``pending`` of them, may be under way still.
void wait_group(size_t pending) {
  for (auto& groups = current->groups; groups.size() > pending; groups.pop_front())
    for (const Copy& each : groups.front()) std::memcpy(each.to, each.from, each.bytes);
}

unsigned shared_place(const void* address) {
  return static_cast<const unsigned char*>(address) - buf_dyn_shmem_ptr;
}

void load_shared(uint32_t& value, unsigned at) {
  if (at % 4) fail(cudaErrorMisalignedAddress);
  std::memcpy(&value, buf_dyn_shmem_ptr + at, 4);
}

void load4_if(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at, int lives) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  uint32_t words[4] = {};
  if (lives) std::memcpy(words, at, sizeof words);
  a = words[0], b = words[1], c = words[2], d = words[3];
}

void load4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const void* at) {
  load4_if(a, b, c, d, at, 1);
}

void store4(const void* at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  const uint32_t words[] = {a, b, c, d};
  std::memcpy(const_cast<void*>(at), words, sizeof words);
}

void add4(float* at, float a, float b, float c, float d) {
  if (reinterpret_cast<uintptr_t>(at) % 16) fail(cudaErrorMisalignedAddress);
  at[0] += a, at[1] += b, at[2] += c, at[3] += d;
}

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
void round_to_tf32(uint32_t& rounded, float value) {
  std::memcpy(&rounded, &value, 4);
  if (std::isfinite(value)) rounded = (rounded + 0x1000u) & ~0x1fffu;
}

void exp2(float& power, float value) { power = std::exp2(value); }
void log2(float& exponent, float value) { exponent = std::log2(value); }
void reciprocal(float& inverse, float value) { inverse = 1.0f / value; }

template <typename T>
static float element(uint32_t word, int at) {
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
static unsigned described(uint64_t descriptor, int line, int depth, bool turned) {
  const unsigned start = (descriptor & 0x3fff) * 16, next = (descriptor >> 16 & 0x3fff) * 16;
  const unsigned eight = (descriptor >> 32 & 0x3fff) * 16;
  if (descriptor >> 62 != 1) fail(cudaErrorLaunchFailure);
  const int row = turned ? depth : line, column = turned ? line : depth;
  const unsigned at = start + column / 64 * next + row / 8 * eight + row % 8 * 128 + column % 64 * 2;
  return at ^ (at >> 7 & 7) << 4;
}

static float number(unsigned at, bool wide_range) {
  uint16_t bits;
  std::memcpy(&bits, buf_dyn_shmem_ptr + at, 2);
  const uint32_t word = bits;
  return wide_range ? element<nv_bfloat16>(word, 0) : element<half>(word, 0);
}

static void carry_out(const Product& product) {
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
static void begin(Product product) {
  if ((current - threads) % 2) carry_out(product);
  else current->begun.push_back(std::move(product));
}

void commit_products() {
  auto& begun = current->begun;
  current->committed.insert(current->committed.end(), begun.begin(), begun.end());
  begun.clear();
}

void settle_products() {
  for (const Product& each : current->committed) carry_out(each);
  current->committed.clear();
}

void multiply(const void* const* at, size_t given, bool left_turned, bool right_turned,
              bool wide_range) {
  const size_t count = (given - 3) / 8 * 8;
  Product product{};
  for (size_t i = 0; i < count; ++i) product.sums.push_back((float*)at[i]);
  product.held = given - count == 6;
  product.left_turned = left_turned, product.right_turned = right_turned;
  product.wide_range = wide_range;
  if (product.held) {
    uint32_t own[4];
    for (int i = 0; i < 4; ++i) std::memcpy(own + i, at[count + i], 4);
    const Warp warp(own[0], own[1], own[2], own[3]);
    for (int r = 0; r < 2; ++r)
      for (int k = 0; k < 16; ++k) {
        const uint32_t word = warp(warp.lane() / 4 * 4 + k % 8 / 2, r + k / 8 * 2);
        product.left[r][k] =
            wide_range ? element<nv_bfloat16>(word, k % 2) : element<half>(word, k % 2);
      }
  } else {
    std::memcpy(&product.left_at, at[count], 8);
  }
  std::memcpy(&product.right_at, at[given - 2], 8);
  product.fresh = *(const int*)at[given - 1] == 0;
  begin(std::move(product));
}

static void enter() {
  body(argument);
  wait(kForever);
}

static void start(Thread& thread, uint3 index, char* stack) {
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
static Waiting run(size_t begin, size_t end, bool forward) {
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
static void run_cta(size_t count) {
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

cudaError_t launch(const cudaLaunchConfig_t& config, void (*call)(void*), void* given) {
  const dim3 grid = config.gridDim, cta = config.blockDim;
  const size_t count = size_t{cta.x} * cta.y * cta.z, shared = config.dynamicSmemBytes;
  if (count > kThreads || grid.y > kGrid || grid.z > kGrid || shared > most_shared)
    return cudaErrorInvalidConfiguration;
  const std::unique_ptr<char[]> stacks(new char[count * kStack]);
  body = call, argument = given;
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

template void ldmatrix<false>(uint32_t&, uint32_t&, uint32_t&, uint32_t&, unsigned);
template void ldmatrix<true>(uint32_t&, uint32_t&, uint32_t&, uint32_t&, unsigned);
#define EMULATED_MMA(T)                                                                        \
  template void mma<T>(float&, float&, float&, float&, uint32_t, uint32_t, uint32_t, uint32_t, \
                       uint32_t, uint32_t, float, float, float, float);
EMULATED_MMA(half)
EMULATED_MMA(nv_bfloat16)
EMULATED_MMA(float)

}  // namespace emulated

// What -fsanitize=alignment,bounds calls.
#pragma GCC visibility push(hidden)
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) {
  emulated::fail(cudaErrorMisalignedAddress);
}
extern "C" void __ubsan_handle_out_of_bounds(void*, void*) {
  emulated::fail(cudaErrorIllegalAddress);
}
#pragma GCC visibility pop
