"""A model's config.json and weights from the hub, through the real client against a fake hub."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.data.lab import Answer, FakeHub
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[3]
CONFIG = b"""{"model_type": "llama", "hidden_size": 96, "intermediate_size": 200,
"num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 700}"""
SHOW = ("-m", "launcher", "config", "show", "--device", "cpu", "model.geometry=acme/tiny")
WEIGHTS = """
import sys
from model_check.config.load import Request, load
from model_check.data.sources.weights import weights_directory
request = Request(preset="cpu", overrides=("model.init_from=acme/tiny", "data.cache_dir=cache"))
directory = weights_directory(load(request, lambda: False).settings, print)
print(sorted(file.name for file in directory.iterdir()))
"""


@pytest.fixture
def environ(tmp_path: Path, hub: FakeHub) -> dict[str, str]:
    hub.repos["models/acme/tiny"] = {"config.json": CONFIG, "model.safetensors": b"weights"}
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return own | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def python(*arguments: str, cwd: Path, environ: Mapping[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout


def test_a_geometry_of_the_hub_is_fetched_once(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    code, output = python(*SHOW, cwd=tmp_path, environ=environ)
    assert code == 0, output
    assert "geometry acme/tiny" in output
    hub.stop()
    again = environ | {"HF_HUB_OFFLINE": "1"}
    assert python(*SHOW, cwd=tmp_path, environ=again)[0] == 0


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Answer(403, headers={"X-Error-Code": "GatedRepo"}), "is gated: accept its terms at"),
        (Answer(404, headers={"X-Error-Code": "RepoNotFound"}), "no such model at"),
        (Answer(404, headers={"X-Error-Code": "EntryNotFound"}), "acme/tiny"),
    ],
)
def test_a_refusal_of_the_hub_is_one_message_and_exit_code_2(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str], refusal: Answer, expected: str
) -> None:
    hub.refusals["/acme/tiny/resolve"] = refusal
    code, output = python(*SHOW, cwd=tmp_path, environ=environ)
    assert code == 2, output
    assert expected in output
    assert len(output.splitlines()) == 1


def test_weights_are_fetched_once_and_then_found_without_the_hub(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == 0, output
    assert "weights: fetching acme/tiny" in output
    assert "['config.json', 'model.safetensors']" in output
    asked = len(hub.requests)
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == 0, output
    assert "fetching" not in output
    assert len(hub.requests) == asked


def test_a_model_without_safetensors_is_told(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    hub.repos["models/acme/tiny"] = {"config.json": CONFIG}
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == 1
    assert "acme/tiny: has neither model.safetensors nor pytorch_model.bin" in output


INDEX = b'{"weight_map": {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-2-of-2.bin"}}'


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            [
                "pytorch_model-1-of-2.bin",
                "pytorch_model-2-of-2.bin",
                "pytorch_model.bin.index.json",
            ],
            [
                "pytorch_model-1-of-2.bin",
                "pytorch_model-2-of-2.bin",
                "pytorch_model.bin.index.json",
            ],
        ),
        (["model.safetensors", "pytorch_model.bin", "optimizer.bin"], ["model.safetensors"]),
    ],
    ids=["one", "shards", "both"],
)
def test_a_model_of_the_older_form_is_fetched_where_it_has_no_other(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str], files: list[str], fetched: list[str]
) -> None:
    content = {name: INDEX if name.endswith(".json") else name.encode() for name in files}
    hub.repos["models/acme/tiny"] = {"config.json": CONFIG, **content}
    for _ in range(2):  # the second time from the cache
        code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
        assert code == 0, output
        assert str(["config.json", *fetched]) in output


@pytest.mark.parametrize("tells", [True, False], ids=["asked", "ETag"])
@pytest.mark.parametrize("times", [1, 2])
def test_weights_that_come_with_other_bytes_are_fetched_again_or_refused(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str], times: int, tells: bool
) -> None:
    hub.tells_checksums = tells
    hub.changed_on_the_way = {"/model.safetensors": times}
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == (0 if times == 1 else 1), output
    if times == 1:
        (came,) = (tmp_path / "hf").rglob("*.safetensors")
        assert came.read_bytes() == b"weights"
        return
    assert "acme/tiny: model.safetensors came with other bytes than http://127.0.0.1" in output
    left = [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert not any(path.read_bytes() == b"woights" for path in left), "it would be taken"
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == 0, output


def test_a_small_file_with_other_bytes_is_fetched_again(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    """Git's own checksum, which no ETag of another server is taken for."""
    hub.changed_on_the_way = {"/config.json": 1}
    assert python(*SHOW, cwd=tmp_path, environ=environ)[0] == 0
    (came,) = (tmp_path / "hf").rglob("config.json")
    assert came.read_bytes() == CONFIG


def test_weights_that_came_changed_are_gone_when_the_second_fetch_fails(
    tmp_path: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    hub.changed_on_the_way = {"/model.safetensors": 1}
    hub.refuses_after = {"/model.safetensors": 1}
    code, output = python("-c", WEIGHTS, cwd=tmp_path, environ=environ)
    assert code == 1
    assert "failed to give it (HTTP 500)" in output
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_a_disk_that_is_full_of_the_hubs_files_is_named(
    tmp_path: Path, small_disk: Path, hub: FakeHub, environ: dict[str, str]
) -> None:
    hub.repos["models/acme/tiny"]["model.safetensors"] = bytes(2 << 20)
    code, output = python(
        "-c", WEIGHTS, cwd=tmp_path, environ=environ | {"HF_HOME": str(small_disk)}
    )
    assert code == 1
    assert "acme/tiny: where files of the hub are kept" in output
    assert "set HF_HOME to a directory" in output
