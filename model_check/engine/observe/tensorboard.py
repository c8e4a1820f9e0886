"""Scalars for TensorBoard, by the records and messages of its own package."""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from model_check.engine.checkpoint import storing
from model_check.utils.held import hold_unlinked


class TensorBoardWriter:
    """One file in `directory`. It is whole after every write: TensorBoard's own EventFileWriter
    writes from a thread, which reports a full disk a step late."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory and the file. Raises StorageError."""
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        with storing(directory, "logging.tensorboard_dir"):
            hold_unlinked(directory, make=True).close()
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._has_begun = False

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """The first one takes the place of what an earlier attempt wrote from that step on. Raises
        StorageError."""
        if not self._has_begun:
            begins = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=step, session_log=begins))
            self._has_begun = True
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        with (
            storing(self.path, "logging.tensorboard_dir"),
            hold_unlinked(self.path.parent) as directory,
            directory.append_or_create(self.path.name) as file,
        ):
            RecordWriter(file).write(event.SerializeToString())
