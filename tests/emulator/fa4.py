"""FlashAttention-4's own forward and backward on CPU tensors, for use within `loader.intercept`.

Its Python interface runs unchanged: it compiles its kernels for the emulated GPU, allocates, and
launches every kernel itself, pre- and postprocessing included. Only what it asks of the machine is
answered otherwise: which GPU there is, and whether a tensor is on it. The interface is process-wide
state of that package, so one thread at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from hopwell.emulator import loader

if importlib.util.find_spec("triton") is None and (spec := importlib.util.find_spec("quack")):
    # The interface uses a few modules of quack, whose __init__ imports an autotuner and with it
    # triton, which the CPU build of torch does not bring: have the package without its __init__,
    # except for the part that teaches CuTe tensors to be indexed with `...`.
    sys.modules.setdefault("quack", importlib.util.module_from_spec(spec))
    importlib.import_module("quack.dsl")
interface = pytest.importorskip("flash_attn.cute.interface")


@contextlib.contextmanager
def _on_emulated_gpu(arch: str) -> Iterator[None]:
    from flash_attn.cute import cute_dsl_utils

    from_dlpack = cute_dsl_utils.from_dlpack
    number = int(arch.removeprefix("sm_").rstrip("af"))

    def from_dlpack_as_cuda(tensor: torch.Tensor, **options: Any) -> Any:
        return from_dlpack(loader.device_view(tensor), **options)

    with (
        warnings.catch_warnings(),
        loader.device(arch) as gpu,
        # What a class attribute shadows is put back by deleting it again.
        mock.patch.object(torch.Tensor, "is_cuda", True, create=True),
        mock.patch.object(cute_dsl_utils, "from_dlpack", from_dlpack_as_cuda),
        mock.patch.object(interface, "_get_device_arch", lambda: number),
        mock.patch.object(interface, "get_num_sms_for_selection", lambda *_: gpu.sms),
    ):
        warnings.simplefilter("ignore")  # its uses of deprecated names are not ours to mend
        yield


def fa4_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, arch: str = "sm_90a"
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (batch, len_q, heads_q, head_dim), k and v (batch, len_kv, heads_kv, head_dim), fp16 or
    bf16 on the CPU. Returns out like q and lse (batch, heads_q, len_q) fp32, written by whatever
    handler is active."""
    with _on_emulated_gpu(arch):
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return out, lse


def fa4_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    arch: str = "sm_90a",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) like q, k, v, from what `fa4_forward` returned and dout like out."""
    with _on_emulated_gpu(arch):
        dq, dk, dv = interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)
    return dq, dk, dv
