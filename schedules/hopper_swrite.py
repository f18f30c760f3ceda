"""SWrite for sm_90a: what becomes of a warpgroup's accumulators, and how rows reach ``out``."""

from __future__ import annotations

from dataclasses import astuple
from math import gcd, inf
from typing import Any

from tvm.script import tirx as T
from tvm.tirx.tile_primitive import TilePrimitiveCall

from pit_tvm.gates import Gate

PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}
CHUNK = 8  # 16-bit elements in 16 bytes

# Bit i: element i is not zero; NaN is live, -0.0 is not. ``set`` fills the halves that differ. All
# loads come first, to wait for shared memory once.
_LIVE = """__forceinline__ __device__ void pit_live_{kind}_{count}(
    unsigned char* octets, int wide, const void* staged, int pitch) {{
  uint4 w[{count}];
#pragma unroll
  for (int p = 0; p < {count}; ++p) w[p] = static_cast<const uint4*>(staged)[p * pitch];
#pragma unroll
  for (int p = 0; p < {count}; ++p) {{
    unsigned v[4] = {{w[p].x, w[p].y, w[p].z, w[p].w}}, live = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      asm("set.neu.u32.{kind}x2 %0, %0, %1;" : "+r"(v[i]) : "r"(0u));
      live |= v[i] & (0x00020001u << 2 * i);
    }}
    octets[p * wide] = (unsigned char)(live | live >> 16);
  }}
}}
"""

# tail = erfc(|x| / sqrt(2)) = p(z) ** -16, Abramowitz and Stegun 7.1.28, absolute error below 3e-7.
GELU_TAIL = (
    "float z = fabsf(x) * 0.70710678f;"
    " float p = fmaf(z, fmaf(z, fmaf(z, fmaf(z, fmaf(z, fmaf(z, 4.30638e-5f, 2.765672e-4f),"
    " 1.520143e-4f), 9.2705272e-3f), 4.22820123e-2f), 7.05230784e-2f), 1.f);"
    " p *= p; p *= p; p *= p; p *= p; float tail = __fdividef(1.f, p);"
)

# Keeps NaN, where fmaxf gives 0.
_RELU = 'asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));'
# Branch-free forms in fp32 with one or two special-function operations each. gelu_tanh as
# x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x ** 3).
ACTIVATIONS = {
    "relu": ("pit_relu", f"{_RELU} return x;"),
    "relu2": ("pit_relu2", f"{_RELU} return x * x;"),
    "silu": ("pit_silu", "return __fdividef(x, 1.f + __expf(-x));"),
    "gelu_tanh": (
        "pit_gelu_tanh",
        "float u = x * fmaf(0.07135481283f, x * x, 1.595769122f);"
        " return __fdividef(x, 1.f + __expf(-u));",
    ),
    "gelu": (
        "pit_gelu",
        f"{GELU_TAIL} float half_x = 0.5f * x;"
        " return x < 0.f ? half_x * tail : fmaf(-half_x, tail, x);",
    ),
}


def activate(act: str, x: Any) -> Any:
    """The activation ``act`` (one of `hopper_knobs.ACTS`) of an fp32 expression."""
    if act == "none":
        return x
    name, body = ACTIVATIONS[act]
    code = f"__forceinline__ __device__ float {name}(float x) {{ {body} }}"
    return T.cuda.func_call(name, x, source_code=code, return_type="float32")


def limited(gate: Gate) -> str:
    """Code that limits a gate x and what it gates, y; NaN stays."""
    if gate.limit == inf:
        return ""
    most = f"{gate.limit!r}f"
    return f" x = x > {most} ? {most} : x; y = y > {most} ? {most} : y < -{most} ? -{most} : y;"


def multiply(act: str, gate: Gate, x: Any, y: Any) -> Any:
    """What ``gate`` makes of the activation ``act`` of ``x`` and of ``y``, fp32 expressions."""
    other = f"(y + {gate.offset!r}f)" if gate.offset else "y"
    code = (
        f"{gate_code(act, gate)}\n"
        "__forceinline__ __device__ float pit_gate(float x, float y) {"
        f"{limited(gate)} return pit_gate_act(x) * {other}; }}"
    )
    return T.cuda.func_call("pit_gate", x, y, source_code=code, return_type="float32")


def gate_code(act: str, gate: Gate) -> str:
    """The function of a gate's activation."""
    if gate.alpha == 1.0:
        inner = "return x;" if act == "none" else ACTIVATIONS[act][1]
    else:  # silu's
        inner = f"return __fdividef(x, 1.f + __expf({-gate.alpha!r}f * x));"
    return f"__forceinline__ __device__ float pit_gate_act(float x) {{ {inner} }}"


class _Values:
    """The finished fp32 value of one output element, from the configuration of a ``pit_swrite``.

    ``width`` output columns need 2 * width columns of accumulators with a gate.
    """

    def __init__(self, config: Any) -> None:
        self.acc, self.lane, self.warp = config["acc"], config["lane"], config["warp"]
        self.act, self.gate = str(config["act"]), gate_in(config)
        self.bias = config["bias"] if int(config["has_bias"]) else None
        per_row = config["per_row"]
        self.scales = per_row if int(config["scaled"]) else None
        self.shifts = per_row if int(config["shifted"]) else None
        self.width = int(config["width"])
        self.paired = self.gate is not None and self.gate.interleaved
        self.per_block = self.width // 2 * (1 if self.gate is None else 2)
        self.blocks = int(self.acc.shape[0]) // self.per_block

    def _biased(self, register: Any, column: Any) -> Any:
        x = self.acc[register]
        return x if self.bias is None else x + T.float32(self.bias[self.warp, column])

    def at(self, block: Any, column: Any, side: Any, odd: int) -> Any:
        """Column ``column`` + 2 * (lane % 4) + ``odd`` of row lane // 4 + 8 * ``side`` of a block.

        ``column`` is a multiple of 8 and ``block`` names 16 rows of this warp.
        """
        register = block * self.per_block + column // 2 + side * 2 + odd
        col = column + T.truncmod(self.lane, 4) * 2 + odd
        if self.gate is None:
            x = self._biased(register, col)
            x = activate(self.act, x if self.shifts is None else x + self.shifts[block * 2 + side])
        else:
            up = self._biased(register + self.width // 2, col + self.width)
            x = multiply(self.act, self.gate, self._biased(register, col), up)
        return self._scaled(x, block, side)

    def beside(self, block: Any, column: Any, side: Any) -> Any:
        """The same of gates beside what they gate, at column ``column`` + lane % 4; ``column`` is a
        multiple of 4."""
        register = block * self.per_block + column + side * 2
        col = (column + T.truncmod(self.lane, 4)) * 2
        x, up = self._biased(register, col), self._biased(register + 1, col + 1)
        assert self.gate is not None
        return self._scaled(multiply(self.act, self.gate, x, up), block, side)

    def _scaled(self, x: Any, block: Any, side: Any) -> Any:
        return x if self.scales is None else x * self.scales[block * 2 + side]


def gate_config(gate: Gate | None) -> list[float]:
    """A gate as the configuration of a ``pit_swrite`` has it."""
    return [] if gate is None else [*map(float, astuple(gate))]


def gate_in(config: Any) -> Gate | None:
    """The gate of a configuration."""
    if not config["gate"]:
        return None
    limit, alpha, offset, interleaved = map(float, config["gate"])
    return Gate(limit, alpha, offset, bool(interleaved))


@T.inline
def _find_live(octets, staged, c, warp, lane, lanes):
    """Which elements of the staged rows are not zero, to column ``c`` * lanes on of ``octets``."""
    count = T.meta_var(lanes // 2)
    kind = T.meta_var(PTX_TYPE[staged.dtype])
    row: T.let = T.truncdiv(lane, lanes)
    place: T.let = T.truncmod(lane, lanes)
    T.cuda.func_call(
        f"pit_live_{kind}_{count}",
        octets.ptr_to([warp, row, c * lanes + place]),
        int(octets.shape[-1]) * (32 // lanes),
        staged.ptr_to([warp, row, place * CHUNK]),
        int(staged.shape[-1]) * (32 // lanes) // CHUNK,
        source_code=_LIVE.format(kind=kind, count=count),
    )


@T.inline
def _write_live(live, octets, row, col0, n, warp, lane):
    """The bytes in ``octets`` of a warp's 16 rows to ``live``: two lanes share a row.

    ``row`` is the out row of this lane's, -1 for none. Rows of ``live`` are whole multiples of 16
    bytes, so that no store is split.
    """
    size = T.meta_var(int(octets.shape[-1]))  # of a row
    piece = T.meta_var(gcd(size, 16))
    for q in T.unroll(16 // piece):
        at: T.let = T.truncmod(lane, 2) * 16 + q * piece
        if (row >= 0) & (at < size) & (col0 + at * CHUNK < n):
            for v in T.vectorized(piece):
                live[T.int64(row), T.int64(T.truncdiv(col0, CHUNK) + at + v)] = octets[
                    warp, T.truncdiv(lane, 2), at + v
                ]


def swrite(call: Any, _sctx: Any) -> Any:
    """Epilogue of a warpgroup's accumulators, then rows stored or added at their places in ``out``.

    Configuration: ``acc`` (local fp32, 64-row blocks as ``wgmma`` leaves them), ``width`` output
    columns of the tile, ``act``, ``gate`` (see `gate_config`), ``bias`` (shared; warps, 256) with
    ``has_bias``, ``per_row`` (local fp32, two rows per block): factors with ``scaled``, biases with
    ``shifted``; ``warp`` (of the CTA), ``lane``;
    ``rows`` (local int32) the out row of each 16-byte store of this lane, ``pair_rows`` that of the
    two rows per block which its accumulators belong to, -1 for none; ``accumulate``; ``late``: rows
    stay in the staged ones, which hold all of a warp's. To say what is
    not zero: ``live`` (uint8; rows, bytes), ``octets`` (shared uint8; warps, 16, width / 8), and
    ``live_rows`` (local int32) the out row of row lane // 2 of each block.
    """
    call = TilePrimitiveCall.downcast(call)
    values = _Values(call.config)
    if int(call.config.get("late", 0)):
        return _keep_rows(call, values)
    return _add_rows(call, values) if int(call.config["accumulate"]) else _store_rows(call, values)


def _add_rows(call: Any, values: _Values) -> Any:
    """fp32 additions to ``out`` straight from registers, 32 contiguous bytes per row at once."""
    out, col0 = call.args[0].source, call.args[0].region[-1].min
    rows, lane, width, blocks = call.config["pair_rows"], values.lane, values.width, values.blocks

    @T.prim_func(check_well_formed=False)
    def impl():
        for block in T.unroll(blocks):
            for side in T.unroll(2):
                row: T.let = rows[block * 2 + side]
                if row >= 0:
                    for j in T.unroll(width // 8):
                        col: T.let = col0 + j * 8
                        if col < out.shape[1]:
                            T.ptx["red.relaxed.gpu.global.add.v2.f32"](
                                out.ptr_to(
                                    [
                                        T.int64(row),
                                        T.int64(col + T.truncmod(lane, 4) * 2),
                                    ]
                                ),
                                values.at(block, j * 8, side, 0),
                                values.at(block, j * 8, side, 1),
                            )

    return impl


@T.inline
def _stage_pairs(staged, values, block, row0, col0, cols, convert):
    """`_stage` where two columns beside each other are in one thread."""
    pair = T.alloc_local([4], "uint32")
    for j in T.unroll(-(-cols // 16)):
        if col0 + j * 16 < values.width:
            # 8 x 8 blocks: rows 0-7 and 8-15 of columns 0-7, then of 8-15
            for q in T.unroll(4):
                if col0 + j * 16 + q // 2 * 8 < values.width:
                    column = T.meta_var(col0 + j * 16 + q // 2 * 8)
                    low: T.float32 = values.at(block, column, q % 2, 0)
                    high: T.float32 = values.at(block, column, q % 2, 1)
                    T.ptx[convert](pair[q], high, low)
            row: T.let = row0 + T.truncmod(values.lane, 16)
            if col0 + j * 16 + 8 < values.width:
                T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    staged.ptr_to([values.warp, row, j * 16 + T.truncdiv(values.lane, 16) * 8]),
                    *[pair[i] for i in range(4)],
                )
            else:
                T.ptx["stmatrix.sync.aligned.m8n8.x2.shared.b16"](
                    staged.ptr_to([values.warp, row, j * 16]), pair[0], pair[1]
                )


@T.inline
def _stage(staged, values, block, row0, col0, cols, convert):
    """Convert up to ``cols`` columns from ``col0`` on of a warp's 16 rows, into ``staged`` from row
    ``row0`` on."""
    if values.paired:
        for j in T.unroll(cols // 4):
            if col0 + j * 4 < values.width:
                for side in T.unroll(2):
                    place: T.let = row0 + side * 8 + T.truncdiv(values.lane, 4)
                    staged[values.warp, place, j * 4 + T.truncmod(values.lane, 4)] = T.cast(
                        values.beside(block, col0 + j * 4, side), staged.dtype
                    )
    else:
        _stage_pairs(staged, values, block, row0, col0, cols, convert)


def _keep_rows(call: Any, values: _Values) -> Any:
    """Conversion of all of a warp's rows, which stay in ``staged`` (warps, rows, columns + 8)."""
    staged = call.args[1].source
    convert = f"cvt.rn.{PTX_TYPE[call.args[0].source.dtype]}x2.f32"

    @T.prim_func(check_well_formed=False)
    def impl():
        for block in T.unroll(values.blocks):
            _stage(staged, values, block, block * 16, 0, values.width, convert)

    return impl


def _store_rows(call: Any, values: _Values) -> Any:
    """Conversion and 16-byte stores, 16 rows x ``cols`` of a warp at a time through ``staged``.

    ``staged`` is (warps, 16, cols + 8): each warp turns its rows in its own part.
    """
    out, staged, col0 = call.args[0].source, call.args[1].source, call.args[0].region[-1].min
    rows, lane, warp = call.config["rows"], values.lane, values.warp
    live, octets, live_rows = (call.config.get(n) for n in ("live", "octets", "live_rows"))
    width, blocks = values.width, values.blocks
    cols = int(staged.shape[-1]) - CHUNK
    lanes = cols // CHUNK  # that store one row
    at_once, stores, chunks = 32 // lanes, lanes // 2, -(-width // cols)
    convert = f"cvt.rn.{PTX_TYPE[out.dtype]}x2.f32"

    @T.prim_func(check_well_formed=False)
    def impl():
        for block in T.unroll(blocks):
            for c in T.unroll(chunks):
                _stage(staged, values, block, 0, c * cols, cols, convert)
                T.cuda.warp_sync()
                for p in T.unroll(stores):
                    row: T.let = rows[block * stores + p]
                    off: T.let = c * cols + T.truncmod(lane, lanes) * CHUNK
                    if (row >= 0) & (off < width) & (col0 + off < out.shape[1]):
                        for v in T.vectorized(CHUNK):
                            out[T.int64(row), T.int64(col0 + off + v)] = staged[
                                warp,
                                p * at_once + T.truncdiv(lane, lanes),
                                T.truncmod(lane, lanes) * CHUNK + v,
                            ]
                if live is not None:
                    if c * cols + T.truncmod(lane, lanes) * CHUNK < width:
                        _find_live(octets, staged, c, warp, lane, lanes)
                T.cuda.warp_sync()
            if live is not None:
                _write_live(live, octets, live_rows[block], col0, out.shape[1], warp, lane)

    return impl
