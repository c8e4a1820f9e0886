"""The image, built for real on a base that debootstrap makes, and started as its runtime would.

Takes minutes and a few GB.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import DEADLINE_S

pytestmark = [
    pytest.mark.root,
    pytest.mark.image,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]
ROOT = Path(__file__).parents[2]
ROUNDS = 20
BASE = "localhost/model-check-base"
# What a runtime does before it becomes the program: namespaces, /proc, /dev/shm, user, environment.
BEGIN = """\
cd "$0"
mount -t proc proc proc
mount -t tmpfs -o mode=1777 tmpfs dev/shm
exec chroot "$@"
"""
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount")


@dataclass(frozen=True)
class Builder:
    """buildah with a storage of its own, and what pip needs here, of which nothing is kept."""

    directory: Path

    def __call__(self, *command: str | Path) -> str:
        storage = ("--storage-driver", "vfs", "--root", self.directory / "images")
        done = subprocess.run(
            ("buildah", *storage, "--runroot", self.directory / "run", *command),
            env=os.environ | {"TMPDIR": str(self.directory)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, command
        return done.stdout.strip()

    def make_base(self) -> None:
        root = self.directory / "base"
        subprocess.run(("debootstrap", "--variant=minbase", "bookworm", root), check=True)
        container = self("from", "scratch")
        self("add", "--quiet", container, root, "/")
        self("commit", "--quiet", "--rm", container, BASE)
        subprocess.run(("rm", "-rf", root), check=True)

    def build(self, tag: str) -> None:
        secrets, volumes = self._pip()
        self(
            *("bud", "--isolation", "chroot", "--build-arg", f"BASE={BASE}"),
            *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
            *(f"--volume={path}:{path}:ro" for path in sorted(volumes)),
            *("--tag", tag, ROOT),
        )

    def _pip(self) -> tuple[dict[str, Path], set[Path]]:
        """This machine's configuration of pip: as secrets of the build, and the directories of this
        machine that it names."""
        told = pip_settings()
        conf, secrets = self.directory / "pip.conf", {}
        if cert := told.pop("cert", None):
            secrets["ca.crt"] = Path(cert)
            told["cert"] = "/run/secrets/ca.crt"
        lines = [f"{name} = {value}" for name, value in told.items()]
        conf.write_text("\n".join(["[global]", *lines, ""]))
        places = [Path(word.removeprefix("file://")) for word in " ".join(told.values()).split()]
        local = {Path(*path.parts[:3]) for path in places if path.is_absolute() and path.exists()}
        return {**secrets, "pip.conf": conf}, local


def pip_settings() -> dict[str, str]:
    command = (sys.executable, "-m", "pip", "config", "list")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    told = (line.partition("=") for line in text.splitlines())
    named = {name.rpartition(".")[2]: shlex.split(value)[0] for name, _, value in told}
    wanted = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "timeout")
    return {name: named[name] for name in wanted if name in named}


@dataclass(frozen=True)
class Image:
    """Its files, unpacked, and what it says of itself."""

    root: Path
    config: dict[str, Any]

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Its entry point, as pid 1 of a container."""
        chroot = ("--userspec=10001:10001", ".")
        given = (
            "-i",
            "-C",
            self.config["WorkingDir"],
            *self.config["Env"],
            "HOME=/home/model-check",
        )
        program = [*self.config["Entrypoint"], *arguments]
        return subprocess.Popen(
            [*CONTAINER, "sh", "-c", BEGIN, self.root, *chroot, "env", *given, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def first_process(self, runtime: "subprocess.Popen[str]") -> int:
        """Its pid outside, once it runs the program: no runtime takes a signal before."""
        program = Path(self.config["Entrypoint"][0]).name
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            for pid in Path(f"/proc/{runtime.pid}/task/{runtime.pid}/children").read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == program:
                    return int(pid)
        raise AssertionError(f"{program} never ran")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    directory = tmp_path_factory.mktemp("image")
    yield Builder(directory)
    # debootstrap leaves it mounted when it is interrupted.
    subprocess.run(("umount", "--quiet", directory / "base" / "proc"))
    subprocess.run(("rm", "-rf", directory), check=True)  # GBs


@pytest.fixture(scope="module")
def image(builder: Builder) -> Iterator[Image]:
    builder.make_base()
    builder.build("model-check")
    container = builder("from", "model-check")
    told = json.loads(builder("inspect", "--type", "image", "model-check"))
    yield Image(Path(builder("mount", container)), told["OCIv1"]["config"])
    builder("umount", container)


def test_a_run_in_the_image_passes_as_a_user(image: Image) -> None:
    assert image.config["User"] == "10001"
    with image.start("--debug") as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "[launcher] PASS: 2 CPU workers trained 10 steps" in said


def test_a_sigterm_in_its_first_second_ends_it_with_143(image: Image) -> None:
    """As `docker stop`."""
    codes, chance = [], random.Random(2026)
    for _ in range(ROUNDS):
        with image.start("--debug") as process:
            first = image.first_process(process)
            time.sleep(chance.random())
            os.kill(first, 15)
            process.communicate(timeout=DEADLINE_S)
        codes.append(process.returncode)
    assert codes == [143] * ROUNDS


def test_nothing_of_the_build_machine_is_in_the_image(image: Image) -> None:
    assert not (image.root / "etc" / "pip.conf").exists()
    assert not [*image.root.glob("run/secrets/*"), *image.root.glob("model_check/.*[!v]")]
    words = " ".join(
        map(str, (image.config, (image.root / "model_check/.venv/pyvenv.cfg").read_text()))
    )
    assert str(ROOT) not in words
