"""`python -m hopwell demo`: attention where you are, measured against float64.

With a GPU that there are kernels for, on it, with times beside cuDNN's; else on the emulator, with
the checker's verdict and the counters.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend

from . import checks
from .autograd import attention
from .emulate import emulate
from .functions import forward, warmup

WIDE = 150  # characters that a table with counters takes
# Unit roundoff: the largest relative error of rounding to nearest.
_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# float32 rounds scores relative to their size: from here on, so count errors of the LSE.
_LSE_ABSOLUTE = 100.0


@dataclass(frozen=True)
class Case:
    """One call of the demo."""

    batch: int
    len_q: int
    len_kv: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    head_dim_v: int | None = None  # None: head_dim
    scale: float | None = None  # None: 1/sqrt(head_dim)

    @property
    def group(self) -> int:
        """Heads of q for each of k."""
        return self.heads // self.heads_kv

    def inputs(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normal q, k and v, (batch, len, heads, head_dim), alike on every device."""
        random = torch.Generator().manual_seed(0)
        shapes = (
            (self.batch, self.len_q, self.heads, self.head_dim),
            (self.batch, self.len_kv, self.heads_kv, self.head_dim),
            (self.batch, self.len_kv, self.heads_kv, self.head_dim_v or self.head_dim),
        )
        q, k, v = (torch.randn(shape, generator=random).to(device, self.dtype) for shape in shapes)
        return q, k, v

    def __str__(self) -> str:
        dtype = "bf16" if self.dtype == torch.bfloat16 else "fp16"
        head_dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v else self.head_dim
        scale = "" if self.scale is None else f" scale {self.scale}"
        return (
            f"{self.batch} x {self.len_q} x {self.len_kv}  {self.heads}/{self.heads_kv} x "
            f"{head_dims}  {dtype} {'causal' if self.causal else 'full'}{scale}"
        )


CASES = (
    Case(1, 512, 512, 2, 2, 128, torch.bfloat16, causal=False),
    Case(1, 1024, 1024, 1, 1, 128, torch.bfloat16, causal=True),
    Case(2, 333, 777, 4, 2, 64, torch.float16, causal=True),  # GQA, ragged
    Case(1, 1000, 61, 2, 1, 64, torch.bfloat16, causal=False),  # MQA, less than a tile of keys
    Case(1, 300, 200, 1, 1, 128, torch.float16, causal=True),  # 100 rows with nothing to attend
    Case(1, 300, 300, 1, 1, 192, torch.bfloat16, causal=True, head_dim_v=128),
)
# On the emulator; kernels are compiled first, so fewer of the larger ones.
EMULATED = {"sm_90a": CASES, "sm_100a": (CASES[0], CASES[2], CASES[5])}
# Both passes; every query sees a key.
GRADIENT_CASES = (
    Case(1, 300, 420, 4, 2, 64, torch.bfloat16, causal=True),  # GQA, ragged
    Case(1, 256, 300, 1, 1, 128, torch.float16, causal=False),
)
GPU_CASES = (
    Case(4, 4096, 4096, 16, 16, 128, torch.bfloat16, causal=False),
    Case(4, 4096, 4096, 16, 16, 128, torch.bfloat16, causal=True),
)


@dataclass(frozen=True)
class Errors:
    """How far a result is from float64."""

    out: float  # largest |O - O64|
    share: float  # largest |O - O64| as a share of what rounding allows
    # Largest |LSE - LSE64|; where |LSE64| > 100, times 100 / |LSE64|. There the limit of 1e-4 means
    # 1e-6 of the LSE, 8 to 17 units in float32's last place: scores come out of float32 arithmetic,
    # whose rounding grows with them.
    lse: float

    @property
    def fine(self) -> bool:
        """Whether the errors are rounding and nothing else."""
        return self.share <= 1 and self.lse <= 1e-4


def run() -> bool:
    """Run every case and print a table; returns whether all of them are right."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)  # a table cut to a log's 80 columns cannot be read
    if not torch.cuda.is_available():
        return _on_emulator(console)
    device = torch.device("cuda", torch.cuda.current_device())
    problems = [problem.text for problem in checks.gpu(device, None)]
    if problems:
        console.print(problems[0], "Running on the emulator.", style="yellow")
        return _on_emulator(console)
    return _on_gpu(console)


def exact(
    case: Case, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 (O, LSE, P |V|), as `forward` lays them out."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in inputs)
    k, v = (tensor.repeat_interleave(case.group, dim=1) for tensor in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(case.head_dim) if case.scale is None else case.scale)
    if case.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(~seen.tril(case.len_kv - case.len_q), -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0).unsqueeze(-1))
    return (weights @ v).transpose(1, 2), lse, (weights @ v.abs()).transpose(1, 2)


def measure(
    case: Case, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor
) -> Errors:
    """Compare with float64.

    What rounding allows: P is rounded to the input's type before the second product and O after it,
    each by at most the unit roundoff u, so |O - O64| <= u (P |V| + |O|). A twentieth is added for
    fp32 arithmetic, and 1e-5 of the largest |V| for P below fp16's normal numbers.
    """
    exact_out, exact_lse, spread = exact(case, inputs)
    allowed = 1.05 * _ROUNDOFF[case.dtype] * (spread + exact_out.abs())
    error = (out.double() - exact_out).abs()
    unseen = exact_lse.isneginf()
    # The lse of a row that sees nothing is exactly -inf; anything else is off without measure.
    lse_error = (lse.double() - exact_lse).abs().masked_fill(unseen & lse.isneginf(), 0)
    size = exact_lse.abs().masked_fill(unseen, 0)
    lse_error *= _LSE_ABSOLUTE / size.clamp_min(_LSE_ABSOLUTE)
    return Errors(
        out=error.max().item(),
        share=(error / (allowed + 1e-5 * inputs[2].double().abs().max())).max().item(),
        lse=lse_error.nan_to_num(nan=math.inf).max().item(),
    )


def gradient_errors(
    case: Case, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> tuple[float, ...]:
    """Of dq, dk and dv of `attention`: RMS errors beside float64, relative."""
    leaves = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    attention(*leaves, causal=case.causal).backward(dout)
    wide = tuple(tensor.double().requires_grad_() for tensor in inputs)
    exact(case, wide)[0].backward(dout.double())
    return tuple(
        ((mine.grad.double() - true.grad).norm() / true.grad.norm()).item()
        for mine, true in zip(leaves, wide, strict=True)
        if mine.grad is not None and true.grad is not None
    )


def _on_emulator(console: Console) -> bool:
    verdicts = [_emulated(console, arch, cases) for arch, cases in EMULATED.items()]
    for arch in EMULATED:
        verdicts.append(_gradients(console, f"the {arch} kernels on the emulator", "cpu", arch))
    return _conclude(console, all(verdicts))


def _gradients(console: Console, title: str, device: str, arch: str | None = None) -> bool:
    """A table of backward."""
    from .. import emulator

    table = Table(title=f"Hopwell backward, {title}")
    table.add_column("batch x len_q x len_kv  heads q/kv x dim", no_wrap=True)
    for column in ("dQ error", "dK error", "dV error", *(("checker",) if arch else ()), "s"):
        table.add_column(column, justify="right")
    ok = True
    for case in GRADIENT_CASES:
        inputs = case.inputs(device)
        dout = torch.ones_like(inputs[0]) + inputs[0]
        which: dict[str, Any] = {"head_dims": [case.head_dim], "gqa_groups": [case.group]}
        try:
            with console.status(str(case)), emulate(arch) if arch else nullcontext():
                warmup(dtypes=[case.dtype], causal=[case.causal], backward=True, **which)
                start = time.perf_counter()
                errors = gradient_errors(case, inputs, dout)
        except emulator.KernelFault as fault:
            console.print(f"{case}:\n{fault}", markup=False)
            table.add_row(str(case), "", "", "", f"[red]{len(fault.findings)} findings")
            ok = False
            continue
        fine = max(errors) <= _ROUNDOFF[case.dtype]
        ok &= fine
        shown = [f"{'' if fine else '[red]'}{error:.1e}" for error in errors]
        verdict = ("silent",) if arch else ()
        table.add_row(str(case), *shown, *verdict, f"{time.perf_counter() - start:.1f}")
    console.print(table)
    return ok


def _emulated(console: Console, arch: str, cases: tuple[Case, ...]) -> bool:
    """A table of one SM version's kernels."""
    from .. import emulator

    counted = _COUNTED if console.width >= WIDE else ()  # cut to 80 columns none could be read
    table = _table(f"the {arch} kernel on the emulator", "checker", *counted, "s")
    ok = True
    for case in cases:
        inputs = case.inputs("cpu")
        try:
            with console.status(str(case)), emulate(arch, counters=True) as emulation:
                dims, group = (case.head_dim, case.head_dim_v or case.head_dim), case.group
                which: dict[str, Any] = {"head_dims": [dims], "gqa_groups": [group]}
                warmup(dtypes=[case.dtype], causal=[case.causal], **which)
                start = time.perf_counter()
                out, lse = forward(*inputs, causal=case.causal)
                seconds = time.perf_counter() - start
        except emulator.KernelFault as fault:
            console.print(f"{case}:\n{fault}", markup=False)
            table.add_row(str(case), "", "", "", f"[red]{len(fault.findings)} findings")
            ok = False
            continue
        errors = measure(case, inputs, out, lse)
        ok &= errors.fine
        counters = emulation.report.counters
        numbers = (
            f"{counters.global_read_bytes / 1024:.0f}",
            f"{counters.global_write_bytes / 1024:.0f}",
            f"{counters.tensor_flops / 1e6:.0f}",
            f"{counters.total('mufu') / 1e3:.1f}",
            f"{counters.warp_instructions / 1e3:.0f}",
        )
        shown = numbers if counted else ()
        table.add_row(*_errors(case, errors), "silent", *shown, f"{seconds:.1f}")
    console.print(table)
    return ok


_COUNTED = ("KiB read", "KiB written", "tensor MFLOP", "mufu /1e3", "warp instr /1e3")


def _on_gpu(console: Console) -> bool:
    from ..benchmarks.contenders import of_torch
    from ..benchmarks.timing import Call, able, times

    table = _table(f"on {torch.cuda.get_device_name()}", "us", "cuDNN us")
    cudnn = of_torch(SDPBackend.CUDNN_ATTENTION, "cuDNN")
    ok = True
    for case in (*CASES, *GPU_CASES):
        inputs = case.inputs("cuda")
        with console.status(str(case)):
            out, lse = forward(*inputs, causal=case.causal)
            errors = measure(case, inputs, out, lse)
            ok &= errors.fine
            calls = {"hopwell": Call(partial(forward, *inputs, causal=case.causal))}
            alike = not case.causal or case.len_q == case.len_kv  # else torch's mask is another
            if alike:
                calls[cudnn.name] = cudnn.call(inputs, case.causal)
            us = times(able(calls)[0])
        absent = "no kernel" if alike else "another mask"
        table.add_row(
            *_errors(case, errors),
            f"{us['hopwell'].median:.1f}",
            f"{us[cudnn.name].median:.1f}" if cudnn.name in us else absent,
        )
    console.print(table)
    ok &= _gradients(console, f"on {torch.cuda.get_device_name()}", "cuda")
    return _conclude(console, ok)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"Hopwell forward, {title}")
    table.add_column("batch x len_q x len_kv  heads q/kv x dim", no_wrap=True)
    for column in ("O error", "of allowed", "LSE error", *columns):
        table.add_column(column, justify="right")
    return table


def _errors(case: Case, errors: Errors) -> tuple[str, str, str, str]:
    style = "" if errors.fine else "[red]"
    return (
        str(case),
        f"{style}{errors.out:.1e}",
        f"{style}{errors.share:.0%}",
        f"{style}{errors.lse:.1e}",
    )


def _conclude(console: Console, ok: bool) -> bool:
    console.print(
        "Errors are against float64; O's beside what rounding P and O allows; of gradients RMS, "
        "relative, which may be the unit roundoff.",
        "[green]All as they should be." if ok else "[red]Not as they should be.",
    )
    return ok
