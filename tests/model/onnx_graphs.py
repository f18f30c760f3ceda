"""ONNX graphs as torch's exporter writes them, with random weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser, reference

VOCABULARY, LONGEST, WIDTH, HEADS, INNER = 29, 12, 16, 2, 24

# Sizes are computed by nodes; the mask is picked by an index for each of its dimensions; keys are
# folded to three dimensions to be transposed; rows without a key would be 0.
_ENCODER = """
<ir_version: 8, opset_import: ["": 20]>
encoder (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
    => ({T}[batch, tokens, 16] values, {T}[batch, 16] mean)
{{
    batches = Shape <start = 0, end = 1> (input_ids)
    lengths = Shape <start = 1, end = 2> (input_ids)
    batch_size = Squeeze (batches)
    length = Squeeze (lengths)
    places = Slice (table, zeros, lengths, ones, ones)
    words = Gather <axis = 0> (word_table, input_ids)
    positions = Gather <axis = 0> (place_table, places)
    summed = Add (words, positions)
    x = LayerNormalization <axis = -1, epsilon = 0.00001> (summed, scale, shift)

    live = Cast <to = 9> (attention_mask)
    sequences = Range (zero, batch_size, one)
    keys_at = Range (zero, length, one)
    of_batch = Unsqueeze (sequences, last_three)
    of_key = Unsqueeze (keys_at, first_three)
    both = Max (of_batch, of_key)
    pairs = Shape (both)
    batch_index = Expand (of_batch, pairs)
    batch_part = Unsqueeze (batch_index, end)
    key_index = Expand (of_key, pairs)
    key_part = Unsqueeze (key_index, end)
    index = Concat <axis = -1> (batch_part, key_part)
    seen = GatherND (live, index)
    added = Where (seen, nothing, lowest)

    q_flat = MatMul (x, q_weight)
    q_biased = Add (q_flat, bias)
    headed = Concat <axis = 0> (batches, lengths, rest, head_size)
    q_heads = Reshape <allowzero = 1> (q_biased, headed)
    q = Transpose <perm = [0, 2, 1, 3]> (q_heads)
    k_flat = MatMul (x, k_weight)
    k_heads = Reshape <allowzero = 1> (k_flat, headed)
    k = Transpose <perm = [0, 2, 1, 3]> (k_heads)
    v_flat = MatMul (x, v_weight)
    v_heads = Reshape <allowzero = 1> (v_flat, headed)
    v = Transpose <perm = [0, 2, 1, 3]> (v_heads)
    k_shape = Shape (k)
    k_size = Slice (k_shape, end, far)
    k_length = Slice (k_shape, end_but_one, end)
    k_outer = Slice (k_shape, before, end_but_one)
    folded = Concat <axis = 0> (rest, k_length, k_size)
    k_folded = Reshape (k, folded)
    k_turned = Transpose <perm = [0, 2, 1]> (k_folded)
    unfolded = Concat <axis = 0> (k_outer, k_size, k_length)
    keys = Reshape (k_turned, unfolded)
    product = MatMul (q, keys)
    scaled = Mul (product, factor)
    scores = Add (scaled, added)
    weights = Softmax <axis = -1> (scores)
    no_key = IsNaN (weights)
    kept = Where (no_key, nothing, weights)
    mixed = MatMul (kept, v)
    turned = Transpose <perm = [0, 2, 1, 3]> (mixed)
    joined = Concat <axis = 0> (batches, lengths, rest)
    merged = Reshape <allowzero = 1> (turned, joined)
    attended = Add (merged, x)

    up = MatMul (attended, up_weight)
    up_biased = Add (up, up_bias)
    active = Relu (up_biased)
    down = MatMul (active, down_weight)
    values = Add (down, attended)

    mask_values = Cast <to = {number}> (attention_mask)
    mask_column = Unsqueeze (mask_values, end)
    masked = Mul (values, mask_column)
    total = ReduceSum <keepdims = 0> (masked, ones)
    count = ReduceSum <keepdims = 0> (mask_column, ones)
    at_least = Max (count, tiny)
    mean = Div (total, at_least)
}}
"""


def encoder(dtype: str = "float32") -> onnx.ModelProto:
    """One layer with attention, ReLU, and the mean over tokens, in ``dtype``."""
    elements = {"float32": ("float", 1), "float16": ("float16", 10), "float64": ("double", 11)}
    element, number = elements[dtype]
    limits = np.finfo(dtype)
    model = parser.parse_model(_ENCODER.format(T=element, number=number))
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.uniform(-0.5, 0.5, shape).astype(np.float32).astype(dtype)

    integers = {
        "zeros": [0],
        "ones": [1],
        "zero": 0,
        "one": 1,
        "last_three": [1, 2, 3],
        "first_three": [0, 1, 2],
        "end": [-1],
        "end_but_one": [-2],
        "before": [-(2**63)],
        "far": [2**63 - 1],
        "rest": [-1],
        "head_size": [WIDTH // HEADS],
        "table": [list(range(LONGEST))],
    }
    arrays = {name: np.array(value, np.int64) for name, value in integers.items()}
    arrays |= {
        "word_table": random(VOCABULARY, WIDTH),
        "place_table": random(LONGEST, WIDTH),
        "scale": 1 + random(WIDTH),
        "shift": random(WIDTH),
        "bias": random(WIDTH),
        "up_weight": random(WIDTH, INNER),
        "up_bias": random(INNER),
        "down_weight": random(INNER, WIDTH),
        "factor": np.array((WIDTH // HEADS) ** -0.5, dtype),
        "nothing": np.array(0, dtype),
        "lowest": np.array(max(-3.4e38, limits.min), dtype),
        "tiny": np.array(max(1e-9, limits.tiny), dtype),
    }
    arrays |= {f"{name}_weight": random(WIDTH, WIDTH) for name in "qkv"}
    add_arrays(model, arrays)
    return model


def add_arrays(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> None:
    """Constants of the graph by name."""
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items()
    )


def truth(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What onnx's own evaluator gives, by name."""
    names = [output.name for output in model.graph.output]
    return dict(zip(names, reference.ReferenceEvaluator(model).run(None, given), strict=True))
