"""Hopwell inside torch: under scaled_dot_product_attention, and as operators of its dispatcher.

`operators` are what a traced `attention`, `forward` and `backward` call; a process that loads an
exported program imports this module first, and a policy of selective checkpointing names
`operators.forward.default`.
"""

from .interface.ops import operators
from .interface.sdpa import register

__all__ = ["operators", "register"]
