"""Machine code of a cubin, by NVIDIA's disassembler (package nvidia-cuda-nvdisasm)."""

import re
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path


def opcodes(cubin: bytes) -> Counter[str]:
    """How often each opcode stands in it, with its modifiers: MUFU.EX2, LDTM.x32."""
    files = distribution("nvidia-cuda-nvdisasm").files or []
    tool = next(file.locate() for file in files if file.name in ("nvdisasm", "nvdisasm.exe"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [str(tool), "-c", str(path)], check=True, capture_output=True, text=True
        ).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text))


def count(found: Counter[str], *parts: str) -> int:
    """Of opcodes that begin with one of these."""
    return sum(n for opcode, n in found.items() if opcode.startswith(parts))
