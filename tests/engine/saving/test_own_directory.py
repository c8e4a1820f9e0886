"""Runs in one place: each claims a directory, and finds it again."""

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model_check.dist.world import World
from model_check.engine.run_context import Claim
from model_check.engine.saving import own_directory
from model_check.engine.saving.own_directory import Seeker, checkpoint_directory
from model_check.errors import CheckpointError, StorageError
from model_check.events import Saved, Step
from model_check.utils.checkpoint_names import IN_USE
from tests.engine.conftest import Run, Trained, Worker, make_settings, signalled

Train = Callable[..., Trained]
Start = Callable[..., Worker]
MakeRun = Callable[..., Run]
MakeClaim = Callable[..., AbstractContextManager[Claim]]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def claim(here: Path, said: list[str]) -> MakeClaim:
    """Claim a directory in `here`: `claim("GPU3", training__save_last="true")`."""

    def claimed(
        worker: str, *, is_isolated: bool = False, has_place: bool = False, **changes: Any
    ) -> AbstractContextManager[Claim]:
        saves_none = {"training__save_last": "false"}  # a place alone asks for checkpoints
        settings = make_settings(system__checkpoint_dir=here, **saves_none | changes)
        return checkpoint_directory(Seeker(settings, worker, is_isolated, has_place), said.append)

    return claimed


def test_an_isolated_worker_has_its_own_which_goes_when_nothing_was_saved(
    claim: MakeClaim, here: Path, said: list[str]
) -> None:
    with claim("GPU3", is_isolated=True) as place:
        assert (place.directory, said) == (here / "gpu3", [])
        assert (here / "gpu3" / IN_USE).exists()
    assert not (here / "gpu3").exists()


def test_two_isolated_workers_of_two_runs_share_no_directory(
    claim: MakeClaim, here: Path, said: list[str]
) -> None:
    """Two launchers at once, or two nodes with one file system."""
    with claim("GPU3", is_isolated=True), claim("GPU3", is_isolated=True) as second:
        assert second.directory == here / "gpu3_2"
        assert f"{here / 'gpu3'} is in use by GPU3 (process {os.getpid()} on " in said[0]
        assert said[0].endswith(f"checkpoints and evidence go to {here / 'gpu3_2'}")
        with claim("GPU3", is_isolated=True) as third, claim("GPU5", is_isolated=True) as other:
            assert (third.directory, other.directory) == (here / "gpu3_3", here / "gpu5")


def test_the_second_by_hand_gets_a_directory_of_its_own(
    claim: MakeClaim, here: Path, said: list[str]
) -> None:
    with ExitStack() as stack, claim("GPU0") as first:
        assert (first.directory, said) == (here, [])
        with claim("GPU3") as second:
            assert second.directory == here / "gpu3"
            for name in ("gpu3_2", "gpu3_3"):  # on the same GPU
                assert stack.enter_context(claim("GPU3")).directory == here / name
    with claim("GPU0") as again:
        assert again.directory == here


def test_each_finds_its_own_again_whichever_begins_first(claim: MakeClaim, here: Path) -> None:
    def begin(worker: str) -> Path:
        with claim(worker) as place:
            (place.directory / "last.pt").touch()
            return place.directory

    with claim("GPU0"):
        begin("GPU3")
    begin("GPU0")
    assert begin("GPU3") == here / "gpu3"
    assert begin("GPU0") == here
    assert begin("GPU7") == here  # it never had another


def test_a_place_of_its_own_is_taken_whoever_was_there(claim: MakeClaim, here: Path) -> None:
    with claim("GPU1") as place:
        (place.directory / "last.pt").touch()
    (here / "gpu0").mkdir()
    with claim("GPU0", has_place=True) as again:
        assert again.directory == here


def test_on_a_file_system_without_locks_the_name_of_the_holder_decides(
    claim: MakeClaim, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre, mounted as it is by default."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(own_directory, "flock", no_locks)
    own = here / "gpu3"
    own.mkdir(parents=True)
    for holder, is_free in {
        "": True,
        f"GPU3 (process {os.getppid()} on {os.uname().nodename})": False,
        f"GPU3 (process {os.getpid()} on {os.uname().nodename})": True,  # before a restart
        f"GPU3 (process {2**22 + 1} on {os.uname().nodename})": True,  # no pid is that high
        "GPU3 (process 1 on another_machine)": False,
        "GPU3 (process 1 on another_machine), ended": True,
    }.items():
        (own / IN_USE).write_text(holder)
        with claim("GPU3", is_isolated=True) as place:
            assert (place.directory == own) is is_free, holder


def test_a_directory_that_another_run_has_taken_is_written_no_more(
    claim: MakeClaim, here: Path, tiny_run: MakeRun
) -> None:
    """Both found it free at once, where locks hold nobody off."""
    with claim("GPU3", is_isolated=True) as place:
        run = tiny_run(training__save_last="true", claim=place)
        run.trainer.state.context.claim.check()
        (here / "gpu3" / IN_USE).write_text("GPU3 (process 7 on n2)")
        with pytest.raises(StorageError, match=r"GPU3 \(process 7 on n2\) has taken it"):
            run()
        assert os.listdir(here / "gpu3") == [IN_USE]


def test_a_job_keeps_its_place_where_an_isolated_worker_was(claim: MakeClaim, here: Path) -> None:
    """It went into the directory of that one, since nobody had been in its own."""
    with claim("GPU3", is_isolated=True) as place:
        (place.directory / "last.pt").touch()
    with claim("GPU3") as place:
        assert place.directory == here


@pytest.mark.root
def test_who_may_write_in_a_directory_may_claim_it_after_another_user(said: list[str]) -> None:
    with tempfile.TemporaryDirectory() as public:
        place, parent = Path(public, "gpu3"), Path(public)
        settings = make_settings(system__checkpoint_dir=public, **SAVES)
        claim = partial(checkpoint_directory, Seeker(settings, "GPU3", is_isolated=True))
        parent.chmod(0o755)
        place.mkdir()
        place.chmod(0o777)
        with claim(said.append):
            pass
        os.seteuid(4711)
        try:
            with claim(said.append) as again:
                assert (again.directory, said) == (place, [])
            os.seteuid(0)
            parent.chmod(0o700)
            os.seteuid(4711)
            with pytest.raises(StorageError, match="Permission denied"), claim(said.append):
                pass
        finally:
            os.seteuid(0)


class SecondRank(World):
    """Of a job whose first rank has claimed `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def is_first(self) -> bool:
        return False

    def gathered(self, value: Any) -> list[Any]:
        first = (self._directory, None) if isinstance(value, tuple) else True
        return [first, value]


def test_a_rank_leaves_its_evidence_where_no_other_run_is(claim: MakeClaim, here: Path) -> None:
    def evidence() -> AbstractContextManager[Claim]:
        seeker = Seeker(make_settings(system__checkpoint_dir=here), "GPU3")
        return checkpoint_directory(seeker, print, SecondRank(here))

    with evidence() as place:
        assert place[:2] == (here, here / "gpu3")
    with claim("GPU3", is_isolated=True), evidence() as place:
        assert place[:2] == (here, here / "gpu3_2")


@pytest.mark.parametrize("marks", ["link", "pipe"])
@pytest.mark.parametrize("saves", [True, False])
def test_what_another_user_put_there_is_not_followed(
    claim: MakeClaim, here: Path, said: list[str], tmp_path: Path, marks: str, saves: bool
) -> None:
    canary = tmp_path / "canary"
    here.mkdir()
    here.chmod(0o777)
    canary.write_text("mine")
    if marks == "link":
        (here / IN_USE).symlink_to(canary)
    else:
        os.mkfifo(here / IN_USE)
    if saves:
        with pytest.raises(StorageError, match="cannot be written"), claim("GPU0", **SAVES):
            pass
    else:
        with claim("GPU0") as place:
            assert place.directory == here
        assert "a failure would leave no checkpoint to look at" in said[0]
    assert canary.read_text() == "mine"


SAVES = {"training__save_last": "true"}


@pytest.mark.parametrize(
    "changes",
    [
        SAVES,
        {"training__save_interval": 3},
        {"training__save_on_signal": "true"},
        {"debug__dump_tensors": "true"},
    ],
)
def test_a_place_that_cannot_be_written_is_met_at_the_start(
    claim: MakeClaim, here: Path, said: list[str], changes: dict[str, Any]
) -> None:
    """It was met at the first save, after the training that it should have kept."""
    here.write_text("a file")
    (setting,) = (name.replace("__", ".") for name in changes)
    why = f"{here}: cannot be written: Not a directory"
    with pytest.raises(StorageError, match=f"{why}; {setting} would"), claim("GPU0", **changes):
        pass
    with claim("GPU0") as place:
        assert place.directory == here
    assert said == [f"{why}; a failure would leave no checkpoint to look at"]


def test_auto_takes_the_directory_whose_checkpoints_fit_best(
    here: Path, said: list[str], tiny_run: MakeRun
) -> None:
    for name, seed, rate in (("gpu3", 1, 1e-3), ("gpu3_2", 2, 1e-3), ("gpu3_3", 2, 1e-4)):
        run = {"system__seed": seed, "training__learning_rate": rate, "directory": here / name}
        tiny_run(training__save_last="true", **run)()

    def seek(seed: int, rate: float = 1e-3) -> AbstractContextManager[Claim]:
        run = {"system__seed": seed, "training__learning_rate": rate, "training__resume": "auto"}
        settings = make_settings(system__checkpoint_dir=here, **run)
        return checkpoint_directory(Seeker(settings, "GPU3", is_isolated=True), said.append)

    with seek(2, 1e-4) as best, seek(1) as only:
        assert [place.directory.name for place in (best, only)] == ["gpu3_3", "gpu3"]
        # gpu3_2 has checkpoints that it could go on from, but they are another run's.
        taken = "gpu3_3 holds the checkpoints of this run, and GPU3 "
        with pytest.raises(CheckpointError, match=taken), seek(2, 1e-4):
            pass
    with seek(2) as other:
        assert other.directory.name == "gpu3_2"
    with seek(3) as place:  # the usual one: a message will say why it cannot go on from there
        assert place.directory.name == "gpu3"
    elsewhere = f"GPU3 (process {os.getppid()} on another_machine)"
    with seek(1):  # on another machine: what lies in the other places is another run's
        (here / "gpu3" / IN_USE).write_text(elsewhere)
        with seek(1) as place:
            assert place.directory.name == "gpu3_4"


def test_two_runs_at_once_share_no_file_and_resume_their_own(
    start: Start, train: Train, tmp_path: Path
) -> None:
    """The document's `CUDA_VISIBLE_DEVICES=0 ... &` in one directory, on the CPU."""
    forever = ("training.max_steps=100000", "training.save_interval=1")
    first = start(*forever, "system.seed=1")
    next(event for event in first.listen() if isinstance(event, Saved))
    first.process.send_signal(signal.SIGSTOP)
    second = train(*forever, "system.seed=2", on_event=signalled(Saved, signal.SIGTERM))
    first.process.send_signal(signal.SIGKILL)  # its place is free all the same
    first.finish()
    assert "earlier" not in first.output + second.output
    assert "[CPU0] .checkpoints is in use by CPU0 (process " in second.output
    plain, own = tmp_path / ".checkpoints", tmp_path / ".checkpoints" / "cpu0"
    for seed, place in ((2, own), (1, plain)):  # whichever begins first
        again = (*forever, "--resume", "auto", f"system.seed={seed}")
        resumed = train(*again, on_event=signalled(Step, signal.SIGTERM))
        assert f"[CPU0] Resumed from {place.relative_to(tmp_path)}/step_" in resumed.output
