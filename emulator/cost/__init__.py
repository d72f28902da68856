"""Modelled time: a recorded run, replayed by the rates and latencies of a GPU.

`rates` says what an SM does in a clock and how long things take, with the source of each number;
`work` what a stretch of instructions asks of the units of an SM; `replay` lets warps and engines
advance under the dependencies that the emulator recorded; `timeline` draws what came out.
"""

from .rates import GPUS, Gpu
from .replay import Pauses, Replay, Span, replay

__all__ = ["GPUS", "Gpu", "Pauses", "Replay", "Span", "replay"]
