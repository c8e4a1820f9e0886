"""The files that decide which packages are installed where, and the container's recipe."""

import json
import os
import re
import shutil
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


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage of the image; the last one has no name."""
    given = instructions()
    froms = [n for n, (word, _) in enumerate(given) if word == "FROM"]
    stages = [given[first:end] for first, end in zip(froms, [*froms[1:], None], strict=True)]
    return next(s for s in stages if s[0][1].partition(" AS ")[2] == name)


def copied(given: list[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Of a stage: what is copied out of the tree, and whereto."""
    words = [rest.split() for word, rest in given if word == "COPY" and "--from" not in rest]
    return [(names[:-1], names[-1]) for names in words]


def test_the_image_is_a_cuda_runtime_unless_told_and_its_user_not_root() -> None:
    word, base = instructions()[0]
    assert word == "ARG"
    assert re.fullmatch(r"BASE=nvidia/cuda:[0-9.]+-runtime-ubuntu24\.04", base)
    assert stage("base")[0][1] == "${BASE} AS base"
    users = [rest for word, rest in stage("") if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")


def test_the_image_starts_run_sh_below_an_init_in_a_directory_of_the_users() -> None:
    given = dict(stage(""))  # the last of each
    assert json.loads(given["ENTRYPOINT"]) == ["tini", "-s", "--", "bash", "/model_check/run.sh"]
    assert given["WORKDIR"] == "/workspace"


def test_what_the_image_copies_is_there() -> None:
    for names, _ in copied(instructions()):
        assert all((ROOT / name).exists() for name in names)


def test_the_environment_of_the_image_needs_no_other_file_than_those_copied(
    tmp_path: Path,
) -> None:
    """Else the program's files are copied before it, and each of their changes installs anew."""
    for names, to in copied(stage("environment")):
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / to)
            else:
                (tmp_path / to).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / to)
    code = "import launcher.install.environment, launcher.install.installation as i; i._stamp"
    command = [sys.executable, "-P", "-c", f"{code}(i.Path(i.sys.prefix))"]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=True)


def test_nothing_hidden_goes_into_the_image() -> None:
    """Without .venv, which is of another machine, and .env, which holds secrets."""
    assert ".*" in (ROOT / ".dockerignore").read_text().splitlines()
