"""Where the ranks of a job meet."""

import socket

import pytest

from launcher import job
from launcher.job import open_meeting
from model_check.errors import InternalError


def test_two_meetings_are_two_ports_that_listen() -> None:
    with open_meeting() as one, open_meeting() as other:
        assert one.port != other.port
        for place in (one, other):
            socket.create_connection((place.address, place.port), timeout=10).close()


def test_it_listens_no_longer_than_the_job() -> None:
    with open_meeting() as place:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.address, place.port), timeout=10)


def test_without_ipv4_it_is_on_the_other_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_LOOPBACKS", job._LOOPBACKS[1:])
    with open_meeting() as place:
        assert place.address == "::1"


def test_without_a_loopback_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = ((socket.AF_INET, "192.0.2.1"),)
    monkeypatch.setattr(job, "_LOOPBACKS", nowhere)
    with pytest.raises(InternalError, match="no port can be opened"), open_meeting():
        pass
