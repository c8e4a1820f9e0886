"""Scalars and texts for TensorBoard, by the records and messages of its own package."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from model_check.config.fields import setting_text
from model_check.engine.checkpoint import storing
from model_check.events import Sample
from model_check.utils.held import hold_unlinked


class TensorBoardWriter:
    """One file in `directory`. It is whole after every write: TensorBoard's own EventFileWriter
    writes from a thread, which reports a full disk a step late."""

    def __init__(self, directory: Path, settings: Mapping[str, Any] | None = None) -> None:
        """Makes the directory and the file. `settings`: those of the run, by name, for its texts
        and its hyperparameters. Raises StorageError."""
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        with storing(directory, "logging.tensorboard_dir"):
            hold_unlinked(directory, make=True).close()
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._has_begun = False
        self._settings = settings or {}

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Raises StorageError."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step, values)

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Raises StorageError."""
        named = enumerate(samples, 1)
        self._write(samples[0].step, [_text(f"samples/{n}", _shown(s)) for n, s in named])

    def _write(self, step: int, values: list[Summary.Value]) -> None:
        """The first one takes the place of what an earlier attempt wrote from that step on."""
        if not self._has_begun:
            begins = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=step, session_log=begins))
            self._has_begun = True
            values = [*_of_settings(self._settings), *values]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        with (
            storing(self.path, "logging.tensorboard_dir"),
            hold_unlinked(self.path.parent) as directory,
            directory.append_or_create(self.path.name) as file,
        ):
            RecordWriter(file).write(event.SerializeToString())


def _shown(sample: Sample) -> str:
    """Markdown: prompt and text as they are, in blocks of their own."""
    blocks = (
        f"**{name}**\n\n{indent(text, '    ', lambda _: True)}"
        for name, text in (("prompt", sample.prompt), ("text", sample.text))
    )
    return "\n\n".join(blocks)


def _of_settings(settings: Mapping[str, Any]) -> list[Summary.Value]:
    """As a text, and for the hparams plugin; no settings: nothing."""
    if not settings:
        return []
    lines = "\n".join(f"    {name} = {setting_text(value)}" for name, value in settings.items())
    session = SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kind = "number_value" if is_number else "string_value"
        setattr(session.hparams[name], kind, value if is_number else setting_text(value))
    content = HParamsPluginData(session_start_info=session, version=0).SerializeToString()
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
    metadata = SummaryMetadata(plugin_data=plugin)
    # As the plugin's own `metadata` names it, whose import takes 0.4 s.
    hparams = Summary.Value(tag="_hparams_/session_start_info", metadata=metadata)
    return [_text("settings", lines), hparams]


def _text(tag: str, text: str) -> Summary.Value:
    """As the text plugin reads it."""
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")])
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
