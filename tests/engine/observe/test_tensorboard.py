"""The TensorBoard file, as TensorBoard itself reads it."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from launcher.arguments import parse_run
from model_check.config.arguments import settings_request
from model_check.config.load import load
from model_check.config.schema import Settings
from model_check.engine.run_context import Identity
from model_check.errors import StorageError
from model_check.events import Sample
from model_check.hooks.observe.observers import _tensorboard_directory
from model_check.hooks.observe.tensorboard import TensorBoardWriter
from pretrain_main import parser as worker_parser
from tests.engine.conftest import Run


def events(path: Path) -> list[Event]:
    """What TensorBoard's own reader finds; it checks every checksum."""
    return list(LegacyEventFileLoader(str(path)).Load())


def values(event: Event) -> dict[str, float]:
    return {value.tag: value.simple_value for value in event.summary.value}


def test_a_file_has_a_version_and_a_record_a_step(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "logs")
    writer.write(300, {"train/loss": 2.5, "train/grad_norm": 1.5})
    version, _, step = events(writer.path)
    assert (version.step, version.file_version) == (0, "brain.Event:2")
    assert (step.step, step.HasField("file_version")) == (300, False)
    assert values(step) == {"train/loss": 2.5, "train/grad_norm": 1.5}


def test_samples_are_texts_that_stand_as_they_are(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    said = [("# a", "*b*\n\nc"), ("d", "\ud800e")]
    writer.write_samples([Sample(step=7, prompt=p, text=t) for p, t in said])
    shown = EventAccumulator(str(tmp_path)).Reload()
    assert shown.PluginTagToContent("text").keys() == {"samples/1", "samples/2"}
    (first,), (second,) = (shown.Tensors(f"samples/{n}") for n in (1, 2))
    assert first.step == 7
    assert first.tensor_proto.string_val == [
        b"**prompt**\n\n    # a\n\n**text**\n\n    *b*\n    \n    c"
    ]
    assert second.tensor_proto.string_val[0].endswith(b"    ?e")


def test_the_settings_are_a_text_and_hyperparameters(tmp_path: Path) -> None:
    settings = {
        "training.learning_rate": 1e-3,
        "model.rope_scaling": None,
        "training.compile": True,
    }
    TensorBoardWriter(tmp_path, settings).write(0, {"train/loss": 1.0})
    shown = EventAccumulator(str(tmp_path)).Reload()
    (text,) = shown.Tensors("settings")
    assert b"training.learning_rate = 0.001" in text.tensor_proto.string_val[0]
    contents = shown.PluginTagToContent("hparams")
    told = HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    hparams = told.session_start_info.hparams
    assert hparams["training.learning_rate"].number_value == 1e-3
    assert hparams["training.compile"].string_value == "true"
    assert hparams["model.rope_scaling"].string_value == "null"


def test_every_write_is_whole_at_once_without_a_close(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    for step in range(3):
        writer.write(step, {"train/loss": 1.0})
        assert [event.step for event in events(writer.path)[2:]] == list(range(step + 1))


def test_what_goes_on_takes_the_place_of_the_steps_that_it_does_again(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path)
    for step in range(6):
        first.write(step, {"train/loss": 1.0})
    second = TensorBoardWriter(tmp_path)
    if second.path == first.path:  # the same process, in the same second
        second.path = tmp_path / f"{first.path.name}.restart"
    for step in range(4, 8):
        second.write(step, {"train/loss": 2.0})
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(s.step, s.value) for s in shown] == [(n, 1.0 if n < 4 else 2.0) for n in range(8)]


def test_a_writer_leaves_what_an_earlier_run_wrote_in_the_same_directory(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path)
    first.write(0, {"train/loss": 1.0})
    before = first.path.read_bytes()
    TensorBoardWriter(tmp_path).write(1, {"train/loss": 2.0})
    assert first.path.read_bytes().startswith(before)


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Its name can be foreseen, and another user may be able to write to the directory."""
    logs, precious = tmp_path / "logs", tmp_path / "precious"
    writer = TensorBoardWriter(logs)
    logs.chmod(0o777)
    precious.write_text("precious")
    writer.path.unlink()
    writer.path.symlink_to(precious)
    with pytest.raises(StorageError, match="is a link that another user may have made"):
        writer.write(1, {"train/loss": 2.0})
    assert precious.read_text() == "precious"


def test_what_float32_cannot_hold_is_infinite(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(0, {"big": 1e300, "small": -1e300, "nan": math.nan})
    *_, step = events(writer.path)
    assert (values(step)["big"], values(step)["small"]) == (math.inf, -math.inf)
    assert math.isnan(values(step)["nan"])


def test_tensorboard_reads_a_whole_run(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    run = tiny_run(logging__tensorboard_dir=str(tmp_path / "tb"))()
    (file,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    read = EventAccumulator(str(file.parent)).Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(s.step, float.fromhex(s.loss)) for s in run.kept.steps()]


def test_a_run_says_where_its_log_is(tiny_run: Callable[..., Run], tmp_path: Path) -> None:
    run = tiny_run(logging__tensorboard_dir=str(tmp_path / "tb"))()
    (file,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    assert file.parent.name == "gpu6"
    assert any(
        line.endswith(f"tensorboard --logdir {file.parent.parent}") for line in run.kept.lines
    )
    assert len(events(file)) == 2 + 4  # what it is, where it begins, and the steps


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model_check_logs_19043_20261125_215344", "baseline_20261125_215344_19043"),
        ("model_check_logs_19043_20261125_215344/infini", "runs_20261125_215344_19043/infini"),
        ("night", "night"),
    ],
)
def test_a_run_has_a_name_that_can_be_read(name: str, shown: str) -> None:
    directory = _tensorboard_directory(Settings(), Identity("GPU6", run_name=name))
    assert directory == Path("tensorboard_logs") / shown / "gpu6"


def test_both_entry_points_take_the_flag_of_the_guide() -> None:
    argv = ["--tensorboard-dir", "my_logs", "--preset", "cpu"]
    for request in (
        parse_run(argv, {}).request,
        settings_request(worker_parser().read(argv), {}),
    ):
        assert load(request, lambda: False).settings.logging.tensorboard_dir == "my_logs"


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        TensorBoardWriter(tmp_path / "file" / "logs")
