"""What ranks find out together when one of them meets a fault: who is told, by whom, and how each
of them ends."""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.nursery import Nursery
from tests.engine.rank_faults import read
from tests.engine.test_ranks import _place, nursery  # noqa: F401 (a fixture)

WAIT_S = 60.0
W2, WQ = "layers.0.feed_forward.w2", "layers.0.attention.wq"
DDP, FSDP = {"launch__mode": "ddp"}, {"launch__mode": "fsdp"}


@dataclass
class Ended:
    code: int
    error: str
    peer_lost: bool
    at: float
    events: list[dict[str, Any]]
    lines: list[str]


Job = Callable[..., list[Ended]]


@pytest.fixture
def job(tmp_path: Path, nursery: Nursery) -> Job:  # noqa: F811
    """Train in so many ranks; how each of them ended, but for the one that hangs. `nodes`:
    the working directory of each."""

    def train(
        num_ranks: int,
        wait_s: float = WAIT_S,
        hangs: int | None = None,
        notices: int | None = None,
        stops_after: int | None = None,
        nodes: Sequence[Path] = (),
        data: Sequence[str] = (),
        **changes: Any,
    ) -> list[Ended]:
        directory = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        plan = {"program": "tests.engine.rank_faults", "out": str(directory / "found")}
        plan |= {"changes": changes, "wait_s": wait_s, "hangs": hangs}
        plan |= {"stops_after": stops_after, "notices": notices}
        plan["nodes"] = [str(node) for node in nodes or [directory] * num_ranks]
        plan["data"] = data or ["the same"] * num_ranks
        outputs = [directory / f"output.{rank}.txt" for rank in range(num_ranks)]
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            environments = [_place(rank, num_ranks, place) for rank in range(num_ranks)]
            codes = nursery.train(plan, environments, place, outputs)
        assert codes == [0] * num_ranks, [output.read_text() for output in outputs]
        return [Ended(**read(directory, rank)) for rank in range(num_ranks) if rank != hangs]

    return train


@pytest.mark.parametrize(
    ("drill", "code", "said"),
    [
        ("nan@2:CPU1", 20, f"gradient not finite, born in {W2} (backward: gradient of its weight)"),
        ("loss_nan@2:CPU0", 20, "born in loss"),
        ("nan_forward@2:CPU1", 20, "born in layers.0"),
        ("flip@2:CPU1", 21, f"{W2}.weight[1024:2048] changed (bit 16 of value 0)"),
        ("flip_moment@2:CPU0", 21, f"{W2}.weight[0:1024]"),
    ],
)
def test_the_rank_with_the_fault_names_its_place_and_the_other_only_lost_it(
    job: Job, drill: str, code: int, said: str
) -> None:
    """Of a model that the ranks share, which none of them can compute alone. The drill acts in the
    first of two micro-batches."""
    ranks = job(2, **FSDP, debug__drill=drill, training__grad_accum_nums=2)
    faulty = ranks.pop(int(drill[-1]))
    assert (faulty.code, faulty.peer_lost) == (code, False)
    assert said in faulty.error
    assert [(rank.code, rank.peer_lost) for rank in ranks] == [(1, True)]


def test_the_others_of_a_job_without_a_launcher_name_the_rank_that_failed_first(job: Job) -> None:
    first, second = job(2, **DDP, debug__drill="nan@2:CPU1")
    assert (first.code, second.code) == (1, 20)
    assert first.error.startswith("step 2: loss or gradients of rank 1 are not finite; rank 1 on ")
    assert " failed first after 2 steps: step 2, CPU1: gradient not finite, born" in first.error


@pytest.mark.parametrize(
    ("drill", "fingerprints", "code", "said"),
    [
        ("inf_weight@2:CPU1", "off", 20, f"born in {W2} (state: its weight)"),
        ("inf_weight@2:CPU1", "full", 21, "changed (more than one bit), to what is not finite,"),
        (f"flip@2:CPU1:{WQ}.weight:30", "full", 21, f"{WQ}.weight[512:1024] changed (bit 30 of"),
    ],
)
def test_a_weight_that_spoils_the_step_of_all_is_told_by_the_rank_where_it_lies(
    job: Job, drill: str, fingerprints: str, code: int, said: str
) -> None:
    """The other one leaves when the evidence is saved: its end would cut that off."""
    first, second = job(2, **FSDP, debug__drill=drill, debug__fingerprints=fingerprints)
    assert (first.code, second.code) == (1, code)
    assert said in second.error
    assert "step 2: weights on rank 1 had changed, or are not finite; rank 1 on " in first.error
    assert first.at > second.at
    (kept,) = (e["path"] for e in second.events if e.get("what") == "dossier")
    assert not json.loads(Path(kept).read_text()).get("shortened")


def test_a_nan_that_comes_again_is_found_in_its_module_by_all_ranks_together(job: Job) -> None:
    drill = f"nan_forward@2:CPU1:{WQ}:always"
    _, second = job(2, **FSDP, debug__drill=drill, debug__dump_tensors="true")
    assert second.code == 20
    assert f"born in {WQ} (forward: its output); it came again" in second.error
    assert any(line.startswith(f"Born in {WQ} (forward: its output)") for line in second.lines)
    saved = [Path(e["path"]) for e in second.events if e["kind"] == "evidence"]
    names = {path.name for path in saved if path.is_file()}
    assert {"nan_grad_step_2.shards.pt", "nan_debug_step_2.pkl"} <= names


def test_a_sum_that_is_not_finite_on_one_rank_alone_is_told_by_it(job: Job) -> None:
    """The others have seen nothing: they go on to their next step, and wait there. It asked them
    who had it too, in a collective of another size, and gloo ended it by SIGABRT."""
    drill = "flip_gradient@2:CPU0:layers.0.attention_norm.weight:30"
    first, *others = job(3, **DDP, debug__drill=drill)
    assert (first.code, first.peer_lost) == (20, False)
    assert "step 2, CPU0: gradient not finite, born in layers.0.attention_norm" in first.error
    assert all(rank.peer_lost for rank in others)


@pytest.mark.parametrize(("mode", "hangs"), [(DDP, 1), (FSDP, 0)], ids=["ddp", "fsdp"])
def test_ranks_wait_for_one_that_hangs_so_long_and_say_that_it_did_not_come(
    job: Job, mode: dict[str, Any], hangs: int
) -> None:
    drill = f"hang@2:CPU{hangs}"
    (rank,) = job(2, wait_s=0.5, hangs=hangs, **mode, debug__drill=drill)
    assert (rank.code, rank.peer_lost) == (1, True)
    assert rank.error.startswith("another rank did not come in 0.5 s; rank ")
    assert rank.error.endswith(" did not come, and said nothing")


def test_ranks_wait_so_long_for_one_that_stops_between_two_steps(job: Job) -> None:
    """Where they tell each other what they read: that wait has no end of its own."""
    (rank,) = job(2, wait_s=0.5, hangs=1, stops_after=1, **DDP)
    assert rank.error.startswith("another rank did not come in 0.5 s; rank ")


def test_a_notice_to_one_rank_ends_all_after_the_same_step_and_saves(job: Job) -> None:
    settings = DDP | {"training__save_on_signal": "true", "training__max_steps": 100}
    first, second = job(2, notices=1, stops_after=2, **settings)
    assert 3 <= len(losses([first])[0]) < 100
    assert losses([first]) == losses([second])
    assert (first.code, second.code) == (0, 0)
    assert second.error.startswith("ended early by SIGUSR1: ")
    assert first.error.startswith("ended early by request: ")
    (saved,) = (e for e in first.events if e["kind"] == "saved")
    assert Path(saved["path"]).name == "last.pt"
    assert saved["step"] == len(losses([first])[0])


def losses(ranks: list[Ended]) -> list[list[str]]:
    return [[e["loss"] for e in rank.events if e["kind"] == "step"] for rank in ranks]


@pytest.mark.parametrize(
    ("drill", "name"), [("raise@2:CPU0", "error.pt"), ("nan@2:CPU1", "nan_grad_step_2.pt")]
)
def test_what_a_failure_has_saved_goes_on_as_a_job_to_the_same_bits(
    job: Job, drill: str, name: str
) -> None:
    """The further rank's lies in a directory of its own."""
    whole = losses(job(2, **DDP))
    failed = job(2, **DDP, debug__drill=drill)
    paths = [str(e.get("path")) for rank in failed for e in rank.events]
    (saved,) = (path for path in paths if path.endswith(name))
    assert Path(saved).parent.name == ("cpu1" if "CPU1" in drill else "checkpoints")
    assert losses(job(2, **DDP, training__resume=saved)) == [steps[2:] for steps in whole]


def prints(ranks: list[Ended]) -> list[list[dict[str, str]]]:
    return [[e.get("fp", {}) for e in rank.events if e["kind"] == "step"] for rank in ranks]


def test_what_spreads_by_the_sum_differs_in_an_audit_alone(job: Job) -> None:
    """Which needs no fingerprints of the steps."""
    drill = {"debug__drill": "flip_activation@2:CPU1:tok_embed:22"}
    unseen = prints(job(3, **DDP, **drill, debug__fingerprints="full"))
    assert unseen[0] == unseen[1] == unseen[2]
    audited = {"debug__fingerprints": "off", "launch__audit_interval": 2}
    first, second, third = prints(job(3, **DDP, **drill, **audited))
    assert first == third
    assert [step for step in range(4) if first[step] != second[step]] == [2]
    assert [name for name in first[2] if first[2][name] != second[2][name]] == ["audit"]


def test_an_audit_changes_no_bit(job: Job) -> None:
    assert losses(job(2, **DDP)) == losses(job(2, **DDP, launch__audit_interval=1))
