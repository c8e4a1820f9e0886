"""The pictures in docs: pages of simulated runs, as a browser shows them.

python -m benchmarks.pictures [--into docs]
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, sync_playwright

from benchmarks import fleet
from benchmarks import page as written
from benchmarks.page import Case
from launcher.report.rebuild import rebuild

NUM_NODES = 200
ODD = Case("20261123_050000", 8, 700, odd_step=640)
HOT = Case("20261123_060000", 8, 2000, slow_step=900)


class Picture(NamedTuple):
    name: str
    page: Path
    width: int
    height: int
    scheme: str = "light"
    since: str | None = None
    """The title from which on it is shown; None: from the top."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("docs"))
    into = parser.parse_args().into.absolute()
    with tempfile.TemporaryDirectory() as place, chdir(place), sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for picture in pictures(Path()):
            take(browser, picture, into)
        browser.close()


def pictures(place: Path) -> Iterator[Picture]:
    """With the pages that they show, which lie in `place`."""
    odd, hot = (place / ".logs" / case.name for case in (ODD, HOT))
    for case, directory in ((ODD, odd), (HOT, hot)):
        written.write_run(case, directory)
        written.row(case, directory)
    yield Picture("report", odd / "report.html", 1120, 900)
    yield Picture("report-phone", odd / "report.html", 390, 860, "dark")
    yield Picture("report-gpus", hot / "report.html", 1248, 930)
    yield Picture("report-charts", hot / "report.html", 1120, 1420, since="Steps")
    fleet.write_fleet(place / "nodes", NUM_NODES, fleet.planned(NUM_NODES))
    rebuild([str(place / "nodes")], print, print)
    yield Picture("fleet", place / "nodes" / "fleet.html", 1120, 860)


def take(browser: Browser, picture: Picture, into: Path) -> None:
    size = {"width": picture.width, "height": picture.height}
    with browser.new_page(viewport=size, color_scheme=picture.scheme) as tab:  # type: ignore[arg-type]
        tab.goto(picture.page.absolute().as_uri())
        title = tab.get_by_role("heading", name=picture.since, exact=True).first
        top = (title.bounding_box() or {"y": 0})["y"] if picture.since else 0
        clip = {"x": 0, "y": top, **size}
        tab.screenshot(path=into / f"{picture.name}.png", full_page=True, clip=clip)


if __name__ == "__main__":
    main()
