"""Where the ranks of a job meet."""

import os
import socket

import pytest

from launcher.nodes import job
from launcher.nodes.job import open_meeting
from launcher.plan import Meeting
from model_check.errors import InternalError


def connects(place: Meeting) -> bool:
    try:
        socket.create_connection((place.address, place.port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_is_taken_and_refused_until_a_rank_listens() -> None:
    with open_meeting() as place, open_meeting() as other:
        assert place.port != other.port
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind((place.address, place.port))
        assert not connects(place)
        with socket.socket(fileno=os.dup(place.fd)) as of_rank_0:
            of_rank_0.listen()
            assert connects(place)


def test_without_ipv4_it_is_on_the_other_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_LOOPBACKS", job._LOOPBACKS[1:])
    with open_meeting() as place:
        assert place.address == "::1"


def test_without_a_loopback_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = ((socket.AF_INET, "192.0.2.1"),)
    monkeypatch.setattr(job, "_LOOPBACKS", nowhere)
    with pytest.raises(InternalError, match="no port is free"), open_meeting():
        pass
