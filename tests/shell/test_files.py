"""The files that decide which packages are installed where, and the container's recipe."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.install.requirements import (
    extra,
    normalised,
    pins,
    required,
    requirements_file,
)

ROOT = Path(__file__).parents[2]
SCRIPTS = ("run.sh", "train_gpu.sh", "train_auto_gpu.sh", "check.sh", ".ci/run")


def test_every_requirement_is_pinned_to_a_version_that_meets_it() -> None:
    wanted = [*required(), *extra("hub"), *extra("midi"), *extra("dev")]
    unmet = [str(need) for need in wanted if not need.met_by(pins().get(normalised(need.name)))]
    assert unmet == []


def test_the_requirements_file_is_the_one_that_the_code_makes() -> None:
    """So is what `pip install -r requirements.txt` installs what run.sh does, at its versions."""
    assert (ROOT / "requirements.txt").read_text() == requirements_file()
    assert {*map(str, required())} <= {*requirements_file().splitlines()}


def test_pip_takes_the_requirements_file_from_any_directory(tmp_path: Path) -> None:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--quiet",
    )
    done = subprocess.run(
        [*pip, "-r", ROOT / "requirements.txt"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_pins_are_plain_versions_and_name_no_host() -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins().values())
    assert "://" not in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_executable_and_strict(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_a_cuda_runtime_and_its_user_not_root() -> None:
    given = instructions()
    assert given[0][0] == "FROM"
    assert re.fullmatch(r"nvidia/cuda:[0-9.]+-runtime-ubuntu24\.04", given[0][1])
    users = [rest for word, rest in given if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")


def test_the_image_starts_run_sh_in_a_directory_of_the_users() -> None:
    given = dict(instructions())  # the last of each
    assert json.loads(given["ENTRYPOINT"]) == ["bash", "/model_check/run.sh"]
    assert given["WORKDIR"] == "/workspace"


def test_what_the_image_copies_is_there() -> None:
    for word, rest in instructions():
        if word == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest


def test_nothing_hidden_goes_into_the_image() -> None:
    """Without .venv, which is of another machine, and .env, which holds secrets."""
    assert ".*" in (ROOT / ".dockerignore").read_text().splitlines()
