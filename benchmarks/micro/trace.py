"""Clock reads at a kernel's own effects: where the time of one CTA goes on this machine's GPU.

python -m hopwell.benchmarks.micro.trace capture FILE   the kernel, here, without a GPU
python -m hopwell.benchmarks.micro.trace run FILE OUT   its clocks, on a GPU, without the compiler

A stamp is put into the PTX before each instruction that others see, and around each that may wait,
so that the same places name spans of the card and of the cost model's replay.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

SLOTS = 4096  # stamps of a warp
# What to stamp before, and whether also behind.
STAMPED = {
    "wgmma.wait_group": True,
    "wgmma.commit_group": False,
    "barrier.sync": True,
    "bar.sync": True,
    "mbarrier.arrive": False,
    "cp.async.bulk.tensor": False,
}
_STAMP = """
add.s64 %trace_at, %trace_at, 8;
mov.u32 %trace_clock, %clock;
mov.b64 %trace_word, {{%trace_clock, %trace_{site}}};
@%trace_mine st.global.u64 [%trace_at], %trace_word;
"""
_BEGIN = """
.reg .pred %trace_mine, %trace_first;
.reg .b32 %trace_clock, %trace_x, %trace_y, %trace_site;
.reg .b64 %trace_at, %trace_word;
mov.u32 %trace_x, %ctaid.x;
setp.eq.u32 %trace_mine, %trace_x, 0;
mov.u32 %trace_x, %tid.x;
and.b32 %trace_y, %trace_x, 31;
setp.eq.and.u32 %trace_mine, %trace_y, 0, %trace_mine;
shr.u32 %trace_x, %trace_x, 5;
mul.wide.u32 %trace_at, %trace_x, {room};
ld.param.u64 %trace_word, [trace];
add.s64 %trace_at, %trace_at, %trace_word;
"""


def _stamp(site: int) -> str:
    # A name of an instruction in a constant: its index, and whether it is behind it.
    return f"\nmov.u32 %trace_site, {site};" + _STAMP.replace("{site}", "site").format()


def stamped(ins: Any) -> bool | None:
    """Whether an instruction has a stamp behind it too; None if it has none at all."""
    return next((b for head, b in STAMPED.items() if ins.opcode.startswith(head)), None)


def instrumented(ptx: str, kernel: Any) -> str:
    """The text with stamps; `kernel` as `emulator.ptx.parse` made it of the text.

    A stamp of instruction i says 2 i, one behind it 2 i + 1.
    """
    pieces: list[tuple[int, str]] = []
    for ins in kernel.instructions:
        behind = stamped(ins) if not ins.predicate else None
        if behind is not None:
            pieces.append((ins.span[0], _stamp(2 * ins.index)))
        if behind:
            pieces.append((ins.span[1], _stamp(2 * ins.index + 1)))
    begin = ptx.index("{", ptx.index(".entry")) + 1
    first = kernel.instructions[0].span[0]
    assert begin < first
    pieces.append((begin, _BEGIN.format(room=8 * SLOTS)))
    for at, text in sorted(pieces, reverse=True):
        ptx = ptx[:at] + text + ptx[at:]
    entry = ptx.index(".entry")
    end = ptx.index(")", entry)
    return ptx[:end].rstrip() + ",\n\t.param .u64 trace\n" + ptx[end:]


def capture(
    shape: tuple[int, int, int, int],
    causal: bool,
    stages: int | None = None,
    turns: bool | None = None,
    heads_kv: int | None = None,
) -> dict[str, Any]:
    """Kernel and parameters of a forward launch on CPU tensors, whose addresses are to replace.

    heads_kv: of K and V, where they are fewer than Q's.
    """
    import cutlass.cute as cute

    from ...emulator import loader, ptx
    from ...kernels import ForwardFacts, forward_kernel
    from ...kernels.tiles import forward_tiles

    batch, length, heads, dim = shape
    facts = ForwardFacts("bfloat16", dim, dim, causal)
    shapes = _shapes(shape, heads_kv or heads)
    tensors = {name: torch.zeros(each, dtype=torch.bfloat16) for name, each in shapes.items()}
    tensors["lse"] = torch.zeros(batch, heads, length)
    tensors["counter"] = torch.zeros(1, dtype=torch.int32)
    found: list[dict[str, Any]] = []

    def keep(launch: loader.Launch) -> None:
        kernel = ptx.parse(launch.ptx, launch.entry)
        parameters = [
            ctypes.string_at(address, param.size).hex()
            for address, param in zip(launch.args, kernel.params, strict=True)
        ]
        found.append(
            {
                "ptx": instrumented(launch.ptx, kernel),
                "entry": launch.entry,
                "grid": launch.grid,
                "block": launch.block,
                "smem": launch.smem_bytes,
                "parameters": parameters,
            }
        )

    with loader.device("sm_90a"):
        tiles = forward_tiles("sm_90a", dim, dim)
        if stages:
            tiles = replace(tiles, stages_k=stages, stages_v=stages)
        if turns is not None:
            tiles = replace(tiles, ping_pong=turns, ping_pong_full=None)
        function, arguments, options = forward_kernel("sm_90a", facts, tiles)
        options += " --generate-line-info --keep-ptx"
        compiled = cute.compile(function, *arguments, options=options)
        with loader.intercept(keep):
            loader.call(
                compiled,
                *(tensors[name] for name in ("q", "k", "v", "o", "lse")),
                dim**-0.5,
                tensors["counter"],
            )
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return {**found[0], "shapes": shapes, "causal": causal, "addresses": addresses}


def _shapes(shape: tuple[int, int, int, int], heads_kv: int) -> dict[str, tuple[int, ...]]:
    batch, length, heads, dim = shape
    return {name: (batch, length, heads_kv if name in "kv" else heads, dim) for name in "qkvo"}


def run(captured: dict[str, Any], launches: int = 5) -> dict[str, list[list[int]]]:
    """Stamps (instruction, clock) of each warp of CTA 0, in the last of some launches."""
    from .card import Loaded, word

    shapes = captured["shapes"]
    batch, length, heads, _ = shapes["q"]
    made = {
        name: torch.randn(each, device="cuda", dtype=torch.bfloat16)
        for name, each in shapes.items()
    }
    made["lse"] = torch.zeros(batch, heads, length, device="cuda")
    made["counter"] = torch.zeros(1, dtype=torch.int32, device="cuda")
    there = {captured["addresses"][name]: made[name].data_ptr() for name in made}
    parameters = []
    for text in captured["parameters"]:
        raw = bytes.fromhex(text)
        words = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint64).tolist()
        moved = np.array([there.get(w, w) for w in words], np.uint64).tobytes()
        parameters.append(moved + raw[len(moved) :])
    threads = captured["block"][0]
    loaded = Loaded(captured["ptx"], captured["entry"], threads, captured["smem"])
    stamps = torch.zeros(threads // 32, SLOTS, dtype=torch.int64, device="cuda")
    for _ in range(launches):
        stamps.zero_()
        loaded.launch(captured["grid"][0], [*parameters, word(stamps.data_ptr())])
    torch.cuda.synchronize()
    q, k, v = (made[name].float().transpose(1, 2) for name in "qkv")
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=captured["causal"], enable_gqa=True
    )
    error = (made["o"].float().transpose(1, 2) - wanted).abs().max().item()
    rows = stamps.cpu().numpy().astype(np.uint64)
    found = {
        str(warp): [[int(w >> 32), int(w & 0xFFFFFFFF)] for w in row.tolist() if w]
        for warp, row in enumerate(rows)
    }
    return {"stamps": found, "error": error}  # pyright: ignore


@click.group()
def main() -> None:
    """Where the time of one CTA of forward goes on a GPU."""


@main.command("capture")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--shape", default="1x1024x16x128", show_default=True)
@click.option("--causal", is_flag=True)
@click.option("--stages", type=int, help="Of K and V; by default the table's.")
@click.option("--turns/--no-turns", default=None, help="By default as the table says.")
@click.option("--heads-kv", type=int, help="Of K and V; by default as many as of Q.")
def _capture(
    file: Path,
    shape: str,
    causal: bool,
    stages: int | None,
    turns: bool | None,
    heads_kv: int | None,
) -> None:
    batch, length, heads, dim = map(int, shape.split("x"))
    made = capture((batch, length, heads, dim), causal, stages, turns, heads_kv)
    file.write_text(json.dumps(made))


@main.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def _run(file: Path, out: Path) -> None:
    out.write_text(json.dumps(run(json.loads(file.read_text()))))


if __name__ == "__main__":
    main()
