"""report.html in a real browser: of scripted runs, and of big ones that were written, not run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page as written
from benchmarks.page import Case
from launcher.report.fleet.report import write_fleet
from launcher.verdict.results import Verdict
from tests.conftest import CAPABILITIES
from tests.corpus.said import OF_FLEET, RUNS, make_again
from tests.e2e.conftest import Launcher
from tests.launcher.verdict.test_fleet import Fleet, steps

pytestmark = pytest.mark.browser

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
CASES = {
    "odd GPU of eight": Case("odd", 8, 700, odd_step=640),
    "slow GPU, and another's Xid": Case("sick", 8, 100, slow_step=40, xid=79),
    "64 GPUs": Case("many", 64, 20),
    "no step": Case("none", 2, 0),
}
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
LOOKS = (
    (1280, "light", "screen"),
    (1280, "dark", "screen"),
    (360, "light", "screen"),
    (360, "dark", "screen"),
    (800, "light", "print"),
)
# The least contrast of a text with what is painted behind it, by WCAG 2.2 (1.4.3), and where.
CONTRAST = """() => {
  const channels = css => css.match(/[0-9.]+/g).map(n => n * (css.startsWith('color(') ? 255 : 1));
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = [...document.body.querySelectorAll('*')].filter(e =>
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const rated = texts.map(e => {
    const a = light(channels(getComputedStyle(e).color)), b = light(behind(e));
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e];
  });
  const [ratio, least] = rated.reduce((x, y) => x[0] < y[0] ? x : y);
  return [ratio, least.outerHTML.slice(0, 80)];
}"""
# Words that stand in two lines, and not because they are longer than a line of a phone.
BROKEN = """() => {
  const broken = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    const around = text.parentElement;
    if (around.closest('pre, .unseen') || !around.checkVisibility()) continue;
    for (const word of text.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
      if (lines.size > 1 && word[0].length <= 30) broken.push(word[0]);
    }
  }
  return broken;
}"""
OF_AXE = ((1280, "light"), (360, "dark"))
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CAPABILITIES["browser"]()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS])
        yield chromium
        chromium.close()


def check(browser: Any, report: Path) -> str:
    """The page's text, once it was seen that it needs nothing, says nothing, fits, breaks no word,
    and that axe has nothing grave to say of it."""
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()
    said: list[str] = []
    with browser.new_page() as tab:
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url))
        tab.on("dialog", lambda dialog: said.append(dialog.message))
        tab.goto(report.as_uri())
        assert tab.evaluate("document.scripts.length") == 0
        for width, scheme, media in LOOKS:
            tab.set_viewport_size({"width": width, "height": 800})
            tab.emulate_media(media=media, color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            ratio, where = tab.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{width} px, {scheme}, {media}: {where}"
            assert media == "print" or tab.evaluate(BROKEN) == []
            if (width, scheme) in OF_AXE:
                found = axe.run(tab).response["violations"]
                assert [each["help"] for each in found if each["impact"] in GRAVE] == []
        assert said == [report.as_uri()]
        text: str = tab.evaluate("document.body.textContent")
    return text


KINDS = ("arms", "gpus", "odd_persistent", "pass", "rounds")
"""A page of each kind is seen each time; those of the other runs of the corpus are alike."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow])
        for name in sorted(path.name for path in RUNS.iterdir())
    ],
)
def test_pages_of_the_corpus(browser: Any, name: str, tmp_path: Path) -> None:
    make_again([name], tmp_path)
    assert "This run" in check(browser, tmp_path / name / "report.html")


def test_a_finding_of_a_fleet_opens_in_full(browser: Any, tmp_path: Path) -> None:
    make_again(OF_FLEET, tmp_path, "--output", str(tmp_path))
    page = tmp_path / "fleet.html"
    check(browser, page)
    with browser.new_page() as tab:
        tab.goto(page.as_uri())
        said = tab.locator("details").first
        assert "it did not come again" not in said.inner_text()
        said.locator("summary").click()
        assert "it did not come again" in said.inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_big_runs(browser: Any, case: Case, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    written.write_run(case, directory)
    written.row(case, directory)
    report = directory / "report.html"
    assert report.stat().st_size <= 30_000 + 2_500 * case.num_gpus
    assert "steps" in check(browser, report)


@pytest.mark.slow
def test_a_fleet_of_a_thousand_nodes(browser: Any, tmp_path: Path) -> None:
    """Which node is told first, and its tile stands out and opens its own page."""
    fleet, healthy = Fleet(), steps()
    for number in range(1000):
        odd = [steps(odd_at=9)] if number == 617 else []
        fleet.add(*odd, *[healthy] * (8 - len(odd)), drill=HOSTILE if number == 3 else None)
    fleet.add(is_dead=True, exit_code=75, summary="it is empty", verdict=Verdict.INCONCLUSIVE)
    write_fleet(fleet.result(), tmp_path)
    report = tmp_path / "fleet.html"
    assert report.stat().st_size <= 1_000_000
    assert check(browser, report).index("node617") < 100
    with browser.new_page(viewport={"width": 1280, "height": 800}) as tab:
        tab.goto(report.as_uri())
        tile = tab.locator(".fleet .SUSPECT")
        assert tile.count() == 1
        assert tile.inner_text().split() == ["S", "node617"]
        assert tile.get_attribute("title").startswith("node617: SUSPECT: GPU0: other bits than")
        assert tile.locator("a").get_attribute("href") == "617/report.html"
        colour = "e => getComputedStyle(e).backgroundColor"
        others = tab.locator(".fleet .PASS a")
        assert others.count() == 999
        assert tile.locator("a").evaluate(colour) != others.first.evaluate(colour)
        assert tab.locator(".findings tbody tr").first.locator("td").nth(2).inner_text() == (
            "GPU0\nGPU-617-0\n0000:0a:00.0\nserial 1320"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drill", "told"),
    [
        (None, "PASS: 2 CPU workers, 4 steps"),
        ("nan@1:CPU1", "FAIL: CPU1"),
        ("flip@1:CPU1", "SUSPECT: CPU1"),
        ("hang@1:CPU1", "silent since"),
    ],
)
def test_short_runs(browser: Any, scripted: Launcher, drill: str | None, told: str) -> None:
    more = [f"debug.drill={drill}", "launch.hang_timeout_s=3"] if drill else []
    run = scripted(*more)
    assert told in check(browser, run.directory / "report.html")


@pytest.mark.slow
def test_rounds(browser: Any, launcher: Launcher) -> None:
    script = "case $MODEL_CHECK_RUN_DIR$MODEL_CHECK_WORKER in *_002CPU1) exit 3;; esac"
    run = launcher("--repeat=3", "--", "bash", "-c", f": '{HOSTILE}'; {script}")
    assert run.exit_code == 3, run.output
    text = check(browser, run.directory / "report.html")
    assert HOSTILE in text
    assert "failed in 1 of 3" in text
    with browser.new_page() as tab:
        tab.goto((run.directory / "report.html").as_uri())
        tab.click("a:text('round_002')")
        assert tab.url == (run.directory / "round_002" / "report.html").as_uri()


@pytest.mark.slow
def test_arms_side_by_side(browser: Any, scripted: Launcher) -> None:
    options = ("--seeds=2", "data.validation=held_out=0.1", "training.eval_interval=2")
    run = scripted("--run-both-models", *options, "--max-steps=12", "model.infini.gate_init=3")
    assert run.exit_code == 0, run.output
    text = check(browser, run.directory / "report.html")
    for told in ("infini beside full", "loss on held_out", "mean of 2 seeds", "100% above 0.9"):
        assert told in text
    with browser.new_page() as tab:
        tab.goto((run.directory / "report.html").as_uri())
        tab.click("a:text('infini/seed_43')")
        assert tab.url == (run.directory / "infini" / "seed_43" / "report.html").as_uri()


def test_lines_and_paths_that_look_like_markup(browser: Any, launcher: Launcher) -> None:
    script = f"print({HOSTILE!r}); raise SystemExit(3)"
    place = launcher.cwd / 'a"><img src=x onerror=alert(3)>'
    run = launcher("--run-dir", str(place), "--", "python3", "-c", script)
    assert run.exit_code == 3, run.output
    text = check(browser, place / "report.html")
    assert HOSTILE in text
    assert str(place) in text
