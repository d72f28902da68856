"""The README's example runs as it stands, and its table says what the checks allow."""

import re
import subprocess
import sys
from pathlib import Path

from hopwell.interface import checks

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert first is not None
    (tmp_path / "example.py").write_text(first[1])
    run = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "torch.Size([1, 300, 4, 64]) torch.Size([1, 300, 4, 64])\n"


def test_the_table_has_the_head_dims_there_are() -> None:
    (row,) = re.findall(r"^\| head dims +\| (.+?) +\|", README, re.MULTILINE)
    needed = checks.HEAD_DIM_NEEDED.removeprefix("a multiple")
    assert row == f"multiples{needed}; v's may be another"
