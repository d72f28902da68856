"""The page of `python -m hopwell timeline` in a headless browser, where there is one."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from hopwell.emulator.cost.timeline import Mark, page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
MARKS = [
    Mark("load", 0, 400, "work", "load_k", 0, "a.py:1", "400 clocks"),
    Mark("load", 400, 1000, "wait", "load_k", 0, "a.py:2", "600 clocks"),
    Mark("tensor", 500, 900, "busy", "mma_s", 3, "a.py:3", "400 clocks"),
]
# Hovers, zooms, pans and filters as a hand would, and notes what the page says.
DRIVER = """
<script>
"use strict";
const said = {}, box = view.getBoundingClientRect();
const spot = (t, row) => ({ clientX: box.left + x(t), clientY: box.top + TOP + ROW * (row + 0.5),
  bubbles: true, cancelable: true });
const state = () => document.getElementById("state").textContent;
said.whole = state();
view.dispatchEvent(new MouseEvent("mousemove", spot(700, 1)));
said.tip = tip.textContent;
view.dispatchEvent(new WheelEvent("wheel", { ...spot(500, 0), deltaY: -400 }));
said.zoomed = state();
view.dispatchEvent(new MouseEvent("mousedown", spot(500, 0)));
window.dispatchEvent(new MouseEvent("mousemove", spot(600, 0)));
window.dispatchEvent(new MouseEvent("mouseup", {}));
said.panned = state();
document.getElementById("reset").click();
document.getElementById("waits").click();
said.without = state();
said.colours = Object.values(colours);
document.title = JSON.stringify(said);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_page_zooms_pans_hovers_and_filters(tmp_path: Path) -> None:
    text = page(MARKS, "a run").replace("</body>", f"{DRIVER}</body>")
    file = tmp_path / "page.html"
    file.write_text(text)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=1200,400"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
    command = [str(BROWSER), *flags, file.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    title = dom.split("<title>")[1].split("</title>")[0].replace("&quot;", '"')
    said = json.loads(title)
    assert said["whole"] == "3 spans, clocks 0 to 1000"
    assert said["tip"].startswith("mma_s, no. 3\n400 clocks\nclocks 500 to 900")
    first, last = (int(n) for n in said["zoomed"].split("clocks ")[1].split(" to "))
    assert 0 < first < 500 < last < 1000
    moved = [int(n) for n in said["panned"].split("clocks ")[1].split(" to ")]
    assert moved[0] == pytest.approx(first - 100, abs=2) and moved[1] - moved[0] == last - first
    assert said["without"] == "2 spans, clocks 0 to 1000"
    greys = sorted(
        sum(w * int(c[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5)))
        for c in said["colours"]
    )
    assert all(b - a > 40 for a, b in pairwise(greys))
