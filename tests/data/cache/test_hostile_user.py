"""A second user, with a uid of its own, attacks a shared cache for some seconds while the first
user prepares in it: `MODEL_CHECK_HOSTILE_S=60` for longer. Each attack alone: `test_planted`."""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import hostile
from tests.data.canary import SECRET, make_private, untouched
from tests.data.lab import ROOT

ATTACKER = 61_112
SECONDS = float(os.environ.get("MODEL_CHECK_HOSTILE_S", "10")) / 2
"""For each victim."""
_HANG_S = 60.0

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(SECONDS + 3 * _HANG_S),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody reaches: pytest's own are its user's alone."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    for name in (hostile.CACHE, hostile.PREPARED):
        (directory / name).mkdir()
        (directory / name).chmod(0o777)
    (directory / hostile.TEXTS).mkdir()
    choice = random.Random(1)
    words = [f"word{number}" for number in range(400)]
    for number in range(hostile.NUM_TEXTS):
        texts = [{"text": " ".join(choice.choices(words, k=30))} for _ in range(60)]
        lines = "\n".join(map(json.dumps, texts))
        (directory / hostile.TEXTS / f"{number}.jsonl").write_text(lines)
    make_private(directory / hostile.PRIVATE)
    yield directory
    assert subprocess.run(["rm", "-rf", str(directory)]).returncode == 0


def start(role: str, place: Path, uid: int) -> subprocess.Popen[str]:
    arguments = (role, place, uid, SECONDS, 7)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.data.hostile", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ends_of(victim: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Each preparation as it ended. One that takes too long is killed: it hangs."""
    assert victim.stdout is not None
    found: list[dict[str, Any]] = []
    begun = None
    while True:
        watchdog = threading.Timer(_HANG_S, victim.kill)
        watchdog.start()
        line = victim.stdout.readline()
        watchdog.cancel()
        if not line:
            assert victim.wait() == 0, f"hangs, or died: {begun}"
            return found
        said = json.loads(line)
        begun = said.get("begins", begun)
        if "code" in said:
            found.append(said)


def check(end: dict[str, Any]) -> None:
    assert end["code"] in (0, 2), end
    assert "Traceback" not in end["said"], end
    errors = [line for line in end["said"].splitlines() if line.startswith("error: ")]
    assert len(errors) == (end["code"] == 2), end
    assert SECRET not in end["said"], end


@pytest.mark.slow  # each attack alone: test_planted
@pytest.mark.parametrize("uid", [61_111, 0], ids=["user", "root"])
def test_nothing_of_ours_outside_is_touched_while_another_user_attacks(
    place: Path, uid: int
) -> None:
    for path in [place / "home", *(place / "home").rglob("*")]:
        os.chown(path, uid, uid)
    with (
        untouched(place / hostile.PRIVATE),
        start("attacker", place, ATTACKER) as attacker,
        start("victim", place, uid) as victim,
    ):
        ends = ends_of(victim)
        output, _ = attacker.communicate(timeout=_HANG_S)
    assert set(os.listdir(place / "home")) <= {"private", "result.json"}
    tricks, codes = json.loads(output), Counter(end["code"] for end in ends)
    print(f"\n{SECONDS:g} s: {sum(tricks.values())} attacks {tricks}")
    print(f"{len(ends)} preparations, by exit code {dict(codes)}: {reasons(ends)}")
    for end in ends:
        check(end)
    assert codes[0] > 0
    assert {trick.split()[0] for trick in tricks} >= {"staging", "directory", "status", "lock"}
    assert not holds_the_secret(place / hostile.CACHE)
    assert not holds_the_secret(place / hostile.PREPARED)


def reasons(ends: list[dict[str, Any]]) -> dict[str, int]:
    """How often each error, without the names in it."""
    return dict(
        Counter(
            line.split(": ", 2)[-1].split(";")[0].split(" .tmp")[0][:60]
            for end in ends
            for line in end["said"].splitlines()
            if line.startswith("error: ")
        )
    )


def holds_the_secret(cache: Path) -> bool:
    """Whether the private text is in any file of the cache, links not followed."""
    for directory, _, names in os.walk(cache):
        for name in names:
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                continue
            if SECRET.encode() in path.read_bytes():
                return True
    return False
