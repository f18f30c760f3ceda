"""Dynamically sparse layers for PyTorch: functions, modules, custom operators for torch.compile.

Importing this package registers the operators ``torch.ops.pit_tvm.*``.
"""

from ..gates import Gate
from .attention import masked_attention
from .attention_by_name import attention_forward, register_attention
from .experts import experts_forward, register_experts
from .functional import grouped_linear, linear_rows, moe_feed_forward
from .listed_mask import ListedMask, list_mask
from .modules import GroupedLinear, LinearRows, MoeFeedForward

__all__ = [
    "Gate",
    "GroupedLinear",
    "LinearRows",
    "ListedMask",
    "MoeFeedForward",
    "attention_forward",
    "experts_forward",
    "grouped_linear",
    "linear_rows",
    "list_mask",
    "masked_attention",
    "moe_feed_forward",
    "register_attention",
    "register_experts",
]
