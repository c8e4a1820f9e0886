"""What comes out of a worker, with the disk and the worker at their worst."""

import os
from pathlib import Path

from launcher.output.append_file import AppendFile
from launcher.output.streams import MAX_EVENT_BYTES, Events, Stream
from model_check.events import Beat, Event, Note, encode


class Listener:
    def __init__(self, path: Path) -> None:
        self.heard: list[Event] = []
        self.complaints: list[str] = []
        self.path = path
        self.events = Events(
            AppendFile(path, self.complaints.append), self.heard.append, self.complaints.append
        )

    def feed(self, data: bytes) -> None:
        self.events.feed(data)


def test_events_split_anywhere_are_heard_once_each(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "events")
    sent = [Note(t=1, text="näher"), Beat(t=2), Note(t=3, text="\n")]
    data = b"".join(map(encode, sent))
    for i in range(len(data)):
        listener.feed(data[i : i + 1])
    assert listener.heard == sent
    assert listener.path.read_bytes() == data


def test_an_undecodable_event_is_told_once_kept_in_the_file_and_harms_no_other(
    tmp_path: Path,
) -> None:
    listener = Listener(tmp_path / "events")
    data = b"not json\n" + encode(Beat(t=1)) + b'{"kind": "unknown"}\n\xff\n' + encode(Beat(t=2))
    listener.feed(data)
    assert listener.heard == [Beat(t=1), Beat(t=2)]
    assert len(listener.complaints) == 1
    assert "not json" in listener.complaints[0]
    assert listener.path.read_bytes() == data


def test_an_endless_event_line_is_skipped_not_collected(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "events")
    for _ in range(5):
        listener.feed(b"x" * MAX_EVENT_BYTES)
        assert len(listener.events._rest) <= MAX_EVENT_BYTES
    listener.feed(b"end of it\n" + encode(Beat(t=1)))
    assert listener.heard == [Beat(t=1)]
    assert len(listener.complaints) == 1


def test_a_last_event_torn_by_death_is_nobodys_mistake(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "events")
    listener.feed(encode(Beat(t=1)) + b'{"kind": "st')
    listener.events.close()
    assert listener.complaints == []
    assert listener.heard == [Beat(t=1)]


def test_a_full_disk_is_told_once_and_the_loss_is_counted() -> None:
    said: list[str] = []
    file = AppendFile(Path("/dev/full"), said.append)
    file.write(b"12345")
    file.write(b"678")
    file.close()
    assert said == [
        "cannot write /dev/full: No space left on device; the run goes on",
        "/dev/full misses 8 bytes that the disk did not take",
    ]


def test_a_file_that_cannot_be_opened_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    file = AppendFile(tmp_path / "file" / "log", said.append)
    file.write(b"x")
    file.close()
    assert len(said) == 1
    assert said[0].startswith(f"cannot open {tmp_path}/file/log: ")


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "a" / "b" / "log", lambda text: None)
    file.write(b"x")
    os.rename(tmp_path / "a", tmp_path / "moved")
    file.write(b"y")
    file.close()
    assert (tmp_path / "moved" / "b" / "log").read_bytes() == b"xy"


def test_a_stream_is_drained_of_what_is_there_not_of_what_comes_meanwhile() -> None:
    """A child of a dead worker may write without end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    num_fed = 0

    def feed(data: bytes) -> None:
        nonlocal num_fed
        num_fed += len(data)
        os.write(writer, data)  # as much again

    os.write(writer, b"x" * 5000)
    stream = Stream(reader, feed, lambda: None)
    assert stream.drain()
    assert num_fed in (5000, 10_000)
    os.close(writer)
    stream.close()
