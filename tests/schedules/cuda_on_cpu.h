// Runs a CUDA kernel of one CTA after another on the CPU. A lane is a fiber; a warp goes on until
// all its lanes stand at a barrier of the CTA, so that warps are as far apart as they may be.
// Asynchronous copies happen at once, or only when waited for.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __launch_bounds__(threads)
using std::max;
using std::min;
typedef unsigned char uchar;
typedef _Float16 half;
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) {
    uint32_t all;
    memcpy(&all, &value, 4);
    bits = (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t all = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &all, 4);
    return value;
  }
};
typedef __nv_bfloat16 nv_bfloat16;
template <class T> struct alignas(2 * sizeof(T)) Pair { T x, y; };
typedef Pair<half> half2;
typedef Pair<float> float2;
typedef Pair<unsigned short> ushort2;
typedef Pair<nv_bfloat16> nv_bfloat162;
typedef Pair<nv_bfloat16> __nv_bfloat162;
template <class T> struct alignas(16) Four { T x, y, z, w; };
typedef Four<unsigned> uint4;
typedef Four<float> float4;
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static half __float2half_rn(float x) { return x; }
static nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static unsigned __pack_half2(half x, half y) {
  const half both[] = {x, y};
  unsigned word;
  memcpy(&word, both, 4);
  return word;
}
static half2 __float22half2_rn(float2 x) { return {half(x.x), half(x.y)}; }
static nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }
static float2 __half22float2(half2 x) { return {float(x.x), float(x.y)}; }
static float2 __bfloat1622float2(nv_bfloat162 x) { return {x.x, x.y}; }
static float2 make_float2(float x, float y) { return {x, y}; }

struct Place { int x, y, z; };
static Place threadIdx, blockIdx;
alignas(128) static uchar shared_memory[232448];

struct Copy { void* to; const void* from; int bytes; };
struct Fiber {
  ucontext_t context;
  Place thread;
  bool done = false;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  std::vector<char> stack = std::vector<char>(1 << 16);
};
struct Barrier { int arrived = 0, passed = 0; };
struct Warp { Barrier barrier; uint32_t sent[32][6]; };

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Barrier cta;
static ucontext_t scheduler;
static Fiber* current;
static bool late;
static std::function<void()> kernel;

static void meet(Barrier& barrier, int number) {
  const int passed = barrier.passed;
  if (++barrier.arrived == number) {
    barrier.arrived = 0;
    ++barrier.passed;
  }
  while (barrier.passed == passed) swapcontext(&current->context, &scheduler);
}
static void __syncthreads() { meet(cta, int(fibers.size())); }
static void meet_warp() { meet(warps[threadIdx.y].barrier, 32); }

static void copy_now(const Copy& copy) {
  memset(copy.to, 0, 16);
  memcpy(copy.to, copy.from, copy.bytes);
}
static void copy16(void* to, const void* from, bool live) {
  if (uintptr_t(to) % 16 || (live && uintptr_t(from) % 16)) abort();
  const Copy copy{to, from, live ? 16 : 0};
  late ? current->open.push_back(copy) : copy_now(copy);
}
#define COPY(size)                                                                           \
  static void ptx_cp_async_legacy_cg_16_##size##_##size(void* to, int at, void* from, int source) { \
    copy16((char*)to + at * size, (char*)from + long(source) * size, true);                  \
  }                                                                                          \
  static void ptx_cp_async_legacy_pred_cg_16_##size##_##size(void* to, int at, void* from,   \
                                                             int source, int live) {         \
    copy16((char*)to + at * size, (char*)from + long(source) * size, live);                  \
  }
COPY(2)
COPY(4)
static void tvm_builtin_ptx_cp_async_commit_group_async_commit_group() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
static void wait_group(size_t left) {
  auto& groups = current->groups;
  for (; groups.size() > left; groups.erase(groups.begin()))
    for (const Copy& copy : groups[0]) copy_now(copy);
}
#define WAIT(left) \
  static void tvm_builtin_ptx_cp_async_wait_group_async_wait_group_##left() { wait_group(left); }
WAIT(0) WAIT(1) WAIT(2) WAIT(3)

static uint32_t tvm_builtin_cuda_cvta_generic_to_shared(const void* place) {
  return uint32_t((const uchar*)place - shared_memory);
}
static void tvm_builtin_ptx_ld_shared_b32(uint32_t& value, uint32_t place) {
  memcpy(&value, shared_memory + place, 4);
}
template <bool trans>
static void ldmatrix(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t place) {
  if (place % 16) abort();
  Warp& warp = warps[threadIdx.y];
  warp.sent[threadIdx.x][0] = place;
  meet_warp();
  uint32_t* registers[] = {&r0, &r1, &r2, &r3};
  for (int part = 0; part < 8; ++part) {  // 16 bits each
    const int matrix = part / 2, near = threadIdx.x % 4 * 2 + part % 2, far = threadIdx.x / 4;
    const int row = trans ? near : far, column = trans ? far : near;
    const uchar* from = shared_memory + warp.sent[matrix * 8 + row][0] + column * 2;
    memcpy((char*)registers[matrix] + part % 2 * 2, from, 2);
  }
  meet_warp();
}
#define tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16 ldmatrix<false>
#define tvm_builtin_ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16 ldmatrix<true>

template <class T> static float part_of(uint32_t word, int at) {
  if (sizeof(T) == 4) word &= 0xffffe000;  // tf32
  T parts[4 / sizeof(T)];
  memcpy(parts, &word, 4);
  return parts[at];
}
template <class T>
static void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  constexpr int each = 4 / sizeof(T), half_depth = 4 * each;
  auto& sent = warps[threadIdx.y].sent;
  const uint32_t own[] = {a0, a1, a2, a3, b0, b1};
  memcpy(sent[threadIdx.x], own, sizeof own);
  meet_warp();
  float sums[] = {c0, c1, c2, c3};
  for (int at = 0; at < 4; ++at) {
    const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2 + at % 2;
    for (int k = 0; k < 2 * half_depth; ++k) {
      const int lane = k % half_depth / each, later = k / half_depth;
      const uint32_t a = sent[row * 4 + lane][at / 2 + 2 * later];
      const uint32_t b = sent[column * 4 + lane][4 + later];
      sums[at] += part_of<T>(a, k % each) * part_of<T>(b, k % each);
    }
  }
  meet_warp();
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32 mma<half>
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32 mma<nv_bfloat16>
#define tvm_builtin_ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32 mma<float>

static void enter() {
  kernel();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}
// One lane after the other, until all of a warp wait for other warps.
static void run_warp(int warp) {
  for (Barrier before{-1, -1}; before.passed != warps[warp].barrier.passed;) {
    before = warps[warp].barrier;
    for (int lane = 0; lane < 32; ++lane) {
      current = &fibers[warp * 32 + lane];
      threadIdx = current->thread;
      if (!current->done) swapcontext(&scheduler, &current->context);
    }
  }
}
static void launch(Place grid, int warp_count, bool late_copies, std::function<void()> body) {
  late = late_copies;
  kernel = body;
  for (int cta_at = 0; cta_at < grid.x * grid.y * grid.z; ++cta_at) {
    blockIdx = {cta_at % grid.x, cta_at / grid.x % grid.y, cta_at / grid.x / grid.y};
    memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
    warps.assign(warp_count, Warp());
    fibers.clear();
    fibers.resize(warp_count * 32);
    cta = Barrier();
    for (size_t at = 0; at < fibers.size(); ++at) {
      Fiber& fiber = fibers[at];
      fiber.thread = {int(at % 32), int(at / 32), 0};
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, enter, 0);
    }
    while (std::any_of(fibers.begin(), fibers.end(), [](Fiber& f) { return !f.done; }))
      for (int warp = 0; warp < warp_count; ++warp) run_warp(warp);
  }
}
