"""cuDNN through its own frontend instead of through torch: one graph a pass and problem."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Tensor = torch.Tensor
HEURISTICS = ("A", "FALLBACK")  # modes by which cuDNN chooses its engine


class Attention:
    """Attention of one shape and mask by cuDNN's frontend (package nvidia-cudnn-frontend).

    Tensors are (batch, len, heads, head_dim); a causal mask is aligned at the first query.

    Raises:
        ImportError: the frontend is not installed.
        Exception: cuDNN has no engine for the problem.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        self._cudnn: Any = importlib.import_module("cudnn")
        self._handle = self._cudnn.create_handle()
        stream = torch.cuda.current_stream(q.device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        self._options = {"attn_scale": 1 / math.sqrt(q.shape[3]), "use_causal_mask": causal}
        self._inputs = {"q": q, "k": k, "v": v}
        batch, len_q, heads, _ = q.shape
        out = q.new_empty(batch, len_q, heads, v.shape[3])
        # (batch, len, heads, 1) in the order (batch, heads, len)
        stats = q.new_empty(batch, heads, len_q, 1, dtype=torch.float32).transpose(1, 2)
        self._results = {"o": out, "stats": stats}

    def forward(self) -> Callable[[], Tensor]:
        """A launch that returns O, (batch, len, heads, head_dim_v), and keeps what backward
        needs."""
        run = self._built("sdpa", self._inputs, self._results, generate_stats=True)
        return partial(_run, run, self._results["o"])

    def backward(self, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """A launch that returns dq, dk and dv like q, k and v; forward runs once, now."""
        self.forward()()
        gradients = {f"d{name}": torch.empty_like(t) for name, t in self._inputs.items()}
        inputs = {**self._inputs, **self._results, "dO": dout}
        run = self._built("sdpa_backward", inputs, gradients)
        return partial(_run, run, tuple(gradients.values()))

    def _built(
        self,
        node: str,
        inputs: Mapping[str, Tensor],
        results: Mapping[str, Tensor],
        **options: Any,
    ) -> Callable[[], Any]:
        """A launch of one node, whose results are outputs of the graph in that order."""
        # cuDNN has heads before lengths.
        inputs, results = (
            {name: t.transpose(1, 2) for name, t in tensors.items()}
            for tensors in (inputs, results)
        )
        kinds = self._cudnn.data_type
        names = {
            torch.bfloat16: kinds.BFLOAT16,
            torch.float16: kinds.HALF,
            torch.float32: kinds.FLOAT,
        }
        graph = self._cudnn.pygraph(
            io_data_type=names[self._inputs["q"].dtype],
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self._handle,
        )
        there = {
            name: graph.tensor(
                name=name, dim=[*t.shape], stride=[*t.stride()], data_type=names[t.dtype]
            )
            for name, t in inputs.items()
        }
        found = getattr(graph, node)(name=node, **there, **self._options, **options)
        pack = {there[name]: t for name, t in inputs.items()}
        for tensor, t in zip(found, results.values(), strict=True):
            tensor.set_output(True).set_dim([*t.shape]).set_stride([*t.stride()])
            tensor.set_data_type(names[t.dtype])
            pack[tensor] = t
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([getattr(self._cudnn.heur_mode, mode) for mode in HEURISTICS])
        graph.check_support()
        graph.build_plans()
        device = self._inputs["q"].device
        workspace = torch.empty(graph.get_workspace_size(), device=device, dtype=torch.uint8)
        return partial(graph.execute, pack, workspace, handle=self._handle)


def _run(launch: Callable[[], Any], result: Any) -> Any:
    launch()
    return result
