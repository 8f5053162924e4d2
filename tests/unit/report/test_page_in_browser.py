"""The page of a report, opened in a real Chromium: light, dark and on a phone; `pytest -m
browser`.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from PIL import Image, ImageStat
from support.run_records import NASTY, PROBE, full_records

from adaptive_batch.report import write_report

pytestmark = pytest.mark.browser

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
MEASURE = r"""
(() => {
  const colour = (text) => text.match(/[\d.]+/g).map(Number);
  const luminance = (text) => {
    const [r, g, b] = colour(text).slice(0, 3).map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const painted = getComputedStyle(at).backgroundColor;
      if (painted !== "rgba(0, 0, 0, 0)") return painted;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [...document.querySelectorAll(
    "h1, h1 small, dt, dd, p, li, figcaption, summary, th, td, footer")];
  const labels = [...document.querySelectorAll("figure svg text")];
  return JSON.stringify({
    figures: [...document.querySelectorAll("figure > svg")].map((svg) => {
      const box = svg.getBoundingClientRect();
      const frame = svg.viewBox.baseVal;
      const spilt = [...svg.querySelectorAll("text")].filter((text) => {
        const at = text.getBoundingClientRect();
        return at.left < box.left - 1 || at.right > box.right + 1
          || at.top < box.top - 1 || at.bottom > box.bottom + 1;
      });
      return {name: svg.parentElement.id, width: box.width, height: box.height,
        title: svg.parentElement.querySelector("figcaption").textContent,
              scale: box.width / frame.width, spilt: spilt.map((text) => text.textContent)};
    }),
    contrasts: texts.map((e) => contrast(getComputedStyle(e).color, ground(e)))
      .concat(labels.map((e) => contrast(getComputedStyle(e).fill, ground(e)))),
    lines: [...document.querySelectorAll("figure [id*='-line2d'] path")]
      .map((e) => getComputedStyle(e).stroke)
      .filter((stroke) => stroke.startsWith("rgb"))
      .map((stroke) => contrast(stroke, ground(document.querySelector("figure")))),
    label_pixels: labels.map((e) => parseFloat(getComputedStyle(e).fontSize)
      * Math.abs(e.ownerSVGElement.getScreenCTM().a)),
    scripts: document.scripts.length,
    page_width: document.documentElement.scrollWidth,
    window_width: innerWidth,
    height: document.documentElement.scrollHeight,
    text: document.body.innerText,
  });
})()
"""


class Browser:
    """Chromium, spoken to over a pipe in the DevTools protocol: JSON messages that end with a zero
    byte.
    """

    def __init__(self, profile):
        (its_input, write), (read, its_output) = os.pipe(), os.pipe()
        # The protocol lies on file descriptors 3 and 4, which only a program in between can give.
        ends = f"({its_input}, {its_output})"
        program = f"import os, sys; a, b = [os.dup2(e, 50 + n) for n, e in enumerate({ends})]; "
        program += "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", program, CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command,
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._write, self._read = (
            os.fdopen(write, "wb", buffering=0),
            os.fdopen(read, "rb", buffering=0),
        )
        self._rest, self._number, self._session = b"", 0, None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self):
        while b"\0" not in self._rest:
            piece = self._read.read(1 << 16)
            assert piece, "chromium has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, *, scheme, width, media="screen"):
        """The page as it is seen: what was measured in it, a picture of the whole of it, what
        happened meanwhile.
        """
        self.events.clear()
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        seen = json.loads(self.call("Runtime.evaluate", expression=MEASURE)["result"]["value"])
        shot = self.call(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": width, "height": seen["height"], "scale": 1},
        )
        return seen, base64.b64decode(shot["data"]), list(self.events)

    def close(self):
        self.call("Browser.close")
        self._process.wait(timeout=30)
        self._write.close()
        self._read.close()


def with_nan():
    records = full_records()
    records.lines[40] = json.dumps({**json.loads(records.lines[40]), "loss": "nan"})
    return records


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = with_nan().write(tmp_path_factory.mktemp("run"), probe=PROBE)
    return write_report(folder)[0]


@pytest.fixture(scope="module")
def views(page, tmp_path_factory):
    assert CHROMIUM, "no chromium on PATH: apt-get install chromium"
    browser = Browser(tmp_path_factory.mktemp("profile"))
    shown = {
        (scheme, width): browser.open(page, scheme=scheme, width=width)
        for scheme in ("light", "dark")
        for width in (1280, 360)
    }
    shown["paper", 1280] = browser.open(page, scheme="dark", width=1280, media="print")
    browser.close()
    kept = os.environ.get("REPORT_SCREENSHOTS")
    for (scheme, width), (_, shot, _) in shown.items() if kept else ():
        with open(os.path.join(kept, f"report_{scheme}_{width}.png"), "wb") as file:
            file.write(shot)
    return shown


VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 360)]


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_goes_wrong_and_nothing_is_asked_of_a_network(views, page, view):
    _, _, events = views[view]
    asked = {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    complaints = (
        "Log.entryAdded",
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
        "Network.loadingFailed",
    )
    assert [event for event in events if event["method"] in complaints] == []


@pytest.mark.parametrize("view", VIEWS)
def test_every_figure_is_seen_whole(views, view):
    seen, _, _ = views[view]
    assert len(seen["figures"]) == 10
    for figure in seen["figures"]:
        assert figure["width"] > 0.6 * min(view[1], 560), figure
        assert figure["height"] > 180, figure
        assert figure["title"], figure
        assert figure["spilt"] == [], figure


@pytest.mark.parametrize("view", VIEWS)
def test_text_and_lines_stand_out_from_their_ground(views, view):
    seen, _, _ = views[view]
    assert len(seen["contrasts"]) > 100
    assert min(seen["contrasts"]) >= 4.5
    drawn = [
        contrast for contrast in seen["lines"] if contrast > 1.6
    ]  # the lines of the grid stay behind
    assert len(drawn) > 20
    assert min(drawn) >= 3


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_as_wide_as_its_window_and_its_labels_can_be_read(views, view):
    seen, _, _ = views[view]
    assert seen["page_width"] <= seen["window_width"] == view[1]
    assert min(seen["label_pixels"]) >= 9


@pytest.mark.parametrize("width", [1280, 360])
def test_dark_is_dark_and_light_is_light(views, width):
    def brightness(scheme):
        return ImageStat.Stat(Image.open(io.BytesIO(views[scheme, width][1])).convert("L")).mean[0]

    assert brightness("light") > 220
    assert brightness("dark") < 60


def test_paper_is_light_where_the_screen_is_dark(views):
    _, shot, _ = views["paper", 1280]
    assert ImageStat.Stat(Image.open(io.BytesIO(shot)).convert("L")).mean[0] > 220


def test_text_of_the_run_is_shown_as_text(views):
    seen, _, _ = views["light", 1280]
    assert NASTY in re.sub(r"\s+", " ", seen["text"])
    assert seen["scripts"] == 0
