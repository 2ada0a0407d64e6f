"""The report's pages in headless Chromium: silent, self-contained, readable in light and dark, on desk and phone."""

import json
import sys
import zlib
from pathlib import Path

import pytest
from chromium import Chromium
from raw_lines import lines_of, requests, run_folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import report, report_runs  # noqa: E402

# Texts whose contrast with what is behind them is too low, as "ratio text". Half-transparent fills count as absent.
CONTRAST = """
(() => {
  const channels = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = channels(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility() || ["TITLE", "DESC"].includes(element.tagName.toUpperCase())) continue;
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own) continue;
    const style = getComputedStyle(element);
    const ink = channels(element instanceof SVGElement ? style.fill : style.color);
    const pair = [light(ink), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) found.push(ratio.toFixed(2) + " " + element.textContent.trim().slice(0, 40));
  }
  return found;
})()
"""
UNNAMED = """
[...document.querySelectorAll("svg:not([aria-hidden]), table, [role=region]")].filter(element =>
  !(element.getAttribute("aria-label") || element.querySelector("caption"))).length
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A full report, one of a load that failed, and a host's history."""
    folder = tmp_path_factory.mktemp("runs")
    lines = lines_of(effect=1.4)
    for line in requests(lines, "B"):
        line.update(steps=50, drafted=[5, 0, 5], accepted=[5, 0, 2], itl_s={"p95": 0.02})
    crowd = [{**line, "concurrency": 4, "decode_s": line["decode_s"] * 0.9} for line in requests(lines)]
    full = run_folder(folder / "full", [*lines, *crowd])
    grid = [{"k": k, "min": m, "max": 4, "speedup": k / 4, "worth": "no"} for k in (1, 3, 9) for m in (1, 4)]
    told = {"overall": {"speedup": 1.4}, "prompts": {f"p{n}": {"speedup": 1.3} for n in range(24)}, "settings": grid}
    (full / "prediction.json").write_text(json.dumps(told))
    long = {"arm": "B", "variant": "v" * 90, "boot": 1, "outcome": "failed", "cause": "x" * 300 + " <script>alert(1)"}
    poor = run_folder(folder / "poor", [line for line in lines if line["arm"] == "A"], [long])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_runs, "DRAWS", 400)
        assert report.main([str(full)]) == report.main([str(poor)]) == 0
        assert report.main(["compare", str(full), str(poor), "--out", str(folder)]) == 0
    return {"full": full / "report.html", "poor": poor / "report.html", "history": folder / "history.html"}


def rows_of(png):
    """The different rows of pixels of a PNG, as stored."""
    chunks, at = [], 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + size]))
        at += size + 12
    head = dict(chunks)[b"IHDR"]
    line = 1 + int.from_bytes(head[:4], "big") * {2: 3, 6: 4}[head[9]]
    pixels = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    return {pixels[start : start + line] for start in range(0, len(pixels), line)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["full", "poor", "history"])
def test_page(browser, pages, tmp_path, name, width, dark):
    assert browser.open(pages[name], width, dark) == []  # nothing in the console, nothing fetched
    assert browser.value("document.documentElement.scrollWidth") <= width
    top, bottom = browser.value(
        "(({top, bottom}) => [top, bottom])(document.querySelector('h1').getBoundingClientRect())"
    )
    assert 0 <= top < bottom - 15 < 900  # seen without scrolling
    words = {"full": "2 faster", "poor": "No verdict: B (vvv", "history": "2 runs of kimi-k2.5 on gpu-host-1"}
    assert words[name] in browser.value("document.querySelector('h1').innerText")
    assert (browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)") is dark
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(CONTRAST) == []
    assert browser.value(UNNAMED) == 0
    assert len(rows_of(browser.screenshot(tmp_path / "page.png"))) > 200
    smallest = "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    assert name == "poor" or browser.value(smallest) > 9
