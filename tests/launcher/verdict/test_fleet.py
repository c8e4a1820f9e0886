"""Many runs as one: who is named, and who is not."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from launcher.verdict.disagreement import Disagreement
from launcher.verdict.fleet import Device, FleetInput, FleetResult, Place
from launcher.verdict.fleet_merge import merged
from launcher.verdict.golden import GoldenResult, Source, Standing
from launcher.verdict.nodes import Elsewhere, JobPart
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.severity import CauseClass, Repeat, Severity
from launcher.verdict.trace import Trace, trace_of
from model_check.events import Evaluation, Event, Step, Vectors
from tests.launcher.report.page.stories import record, result, worker

NUM_STEPS = 40


def steps(
    num: int = NUM_STEPS,
    odd_at: int | None = None,
    salt: int = 1,
    slow: float = 1.0,
    first: int = 0,
) -> list[Event]:
    """`odd_at`: other bits from that step on, of that `salt`."""
    return [
        Step(
            step=number,
            loss=(1.0 if odd_at is None or number < odd_at else 1 + salt / 64).hex(),
            grad_norm=(1.0).hex(),
            lr=0.1,
            ms=100.0,
            busy_ms=(100.0 + number % 3) * slow,
            tokens=1,
            fp={"weights": "a" if odd_at is None or number < odd_at else f"{salt:x}"},
        )
        for number in range(first, first + num)
    ]


class Fleet:
    """Runs, and the events of their workers."""

    def __init__(self) -> None:
        self.runs: list[FleetInput] = []
        self.events: dict[Place, Sequence[Event]] = {}
        self.num_read = 0
        self._traces: dict[int, Trace | None] = {}

    def add(
        self,
        *workers: Sequence[Event],
        uuids: Sequence[str] = (),
        rows: Sequence[Mapping[str, Any]] = (),
        driver: str = "580",
        data: str = "d",
        is_dead: bool = False,
        part: JobPart | None = None,
        **run: Any,
    ) -> "Fleet":
        """A run of these workers. `run`: what else stands in its run.json and report.json."""
        number = len(self.runs)
        made = []
        for at, events in enumerate(workers):
            name = f"GPU{at}"
            uuid = uuids[at] if uuids else f"GPU-{number}-{at}"
            row = {
                "steps": len(events),
                "gpu": {"uuid": uuid, "pci_bus_id": "0000:0a:00.0", "serial": "1320"},
                "detail": {"settings": "s", "data": data},
                "trace": self._trace(events),
                **(rows[at] if rows else {}),
            }
            made.append(worker(name, **row))
            self.events[number, name] = events
        of_record = {*RunRecord.__struct_fields__} - {*RunResult.__struct_fields__}
        asked = {name: run.pop(name) for name in of_record & run.keys()}
        asked = {"host": f"node{number}", "versions": {"driver": driver}, "part": part} | asked
        self.runs.append(
            FleetInput(
                directory=f"runs/{number}",
                path=f"/runs/{number}",
                page=f"{number}/report.html",
                result=result(*made, **run),
                record=record(*(row.name for row in made), **asked),
                devices={row.name: msgspec.convert(row.gpu, Device) for row in made},
                job=None if part is None else (part.job or "", "n0", "n1"),
                is_dead=is_dead,
            )
        )
        return self

    def _trace(self, events: Sequence[Event]) -> Trace | None:
        """Made once of a list that many workers share."""
        if id(events) not in self._traces:
            self._traces[id(events)] = trace_of(events)
        return self._traces[id(events)]

    def load(self, place: Place) -> Iterable[Event]:
        self.num_read += 1
        return self.events[place]

    def result(self) -> FleetResult:
        return merged(self.runs, self.load)


def asked(run: FleetInput, **changes: Any) -> FleetInput:
    """As if this had been asked for."""
    assert run.record is not None
    return replace(run, record=replace(run.record, **changes))


def named(result: FleetResult) -> dict[tuple[int, str | None], tuple[str, str, str | None, int]]:
    """(run, worker) -> kind, verdict, severity, exit code."""
    return {
        (f.run, f.worker): (f.seen, str(f.verdict), f.severity and str(f.severity), f.exit_code)
        for f in result.findings
    }


NAMED: dict[str, Any] = {"verdict": Verdict.SUSPECT, "exit_code": 21, "culprits": ["GPU0"]}
SUSPECT = ("bits", "SUSPECT", "MONITOR", 21)
UNNAMED = ("bits", "INCONCLUSIVE", "MONITOR", 23)


def test_equal_runs_pass_without_a_look_at_their_events() -> None:
    fleet = Fleet().add(steps(), steps()).add(steps()).add(steps(num=20))
    result = fleet.result()
    assert (result.verdict, result.exit_code, result.findings) == (Verdict.PASS, 0, [])
    assert fleet.num_read == 0
    (group,) = result.groups
    assert (group.workers, group.runs, group.compared_steps) == (4, 3, 3 * NUM_STEPS + 20)
    assert "equal bit for bit in 140 steps" in result.summary


@pytest.mark.parametrize("at", [0, 1, 17, NUM_STEPS - 1])
def test_the_odd_worker_is_named_with_its_step_and_what_differs(at: int) -> None:
    fleet = Fleet().add(steps()).add(steps(odd_at=at)).add(steps())
    result = fleet.result()
    assert named(result) == {(1, "GPU0"): SUSPECT}
    (found,) = result.findings
    assert (found.step, found.host, found.device.uuid) == (at, "node1", "GPU-1-0")
    assert found.difference is not None
    assert found.difference.quantity == "loss"
    assert (found.cause_class, found.repeat) == (CauseClass.UNKNOWN, Repeat.NOT_REPLAYED)
    assert result.runs[1].verdict is Verdict.SUSPECT
    assert result.runs[0].verdict is Verdict.PASS
    assert (result.verdict, result.exit_code) == (Verdict.SUSPECT, 21)


def test_the_tensor_is_told_where_both_told_the_fingerprints_of_the_step() -> None:
    def told(value: str) -> Vectors:
        return Vectors(step=9, fp={"weights": {"a": "5", "b": value}}, sizes={"b": (8, 32)})

    right, wrong = steps(num=10), steps(num=10)
    last = wrong[-1]
    assert isinstance(last, Step)
    wrong[-1] = replace(last, fp={"weights": "b"})
    fleet = Fleet().add([*right, told("6")]).add([*wrong, told("7")]).add([*right, told("6")])
    (found,) = fleet.result().findings
    assert found.difference is not None
    assert found.difference.tensor is not None
    assert found.difference.tensor.name == "b"


def test_several_that_differ_at_other_steps_and_in_other_ways_are_each_named() -> None:
    fleet = Fleet()
    for number in range(9):
        at = {2: 30, 4: 3, 7: 30}.get(number)
        fleet.add(steps(odd_at=at, salt=number + 1))
    result = fleet.result()
    assert named(result) == dict.fromkeys([(2, "GPU0"), (4, "GPU0"), (7, "GPU0")], SUSPECT)
    assert [f.step for f in sorted(result.findings, key=lambda f: f.run)] == [30, 3, 30]


def test_without_a_majority_nobody_is_named() -> None:
    result = Fleet().add(steps()).add(steps(odd_at=5)).result()
    assert named(result) == {(0, "GPU0"): UNNAMED, (1, "GPU0"): UNNAMED}
    two_and_two = Fleet().add(steps(), steps()).add(steps(odd_at=5), steps(odd_at=5)).result()
    assert {each[1] for each in named(two_and_two).values()} == {"INCONCLUSIVE"}
    assert two_and_two.exit_code == 23


def test_two_that_differ_after_all_others_ended_leave_these_equal() -> None:
    """As of runs with a deadline: the quickest come farthest."""
    fleet = Fleet().add(steps()).add(steps(odd_at=30))
    for number in range(5):
        fleet.add(steps(num=20 + number))
    told = named(nan_run(fleet, 11).result())
    assert told == {
        (0, "GPU0"): UNNAMED,
        (1, "GPU0"): UNNAMED,
        (7, "GPU0"): ("nonfinite", "FAIL", "ISOLATE", 20),
    }


def test_one_that_ended_before_the_difference_is_not_blamed_for_it() -> None:
    fleet = Fleet().add(steps()).add(steps(odd_at=30)).add(steps()).add(steps(num=20))
    assert named(fleet.result()) == {(1, "GPU0"): SUSPECT}
    # And it has no vote on it.
    two = Fleet().add(steps()).add(steps(odd_at=30)).add(steps(num=20))
    assert named(two.result()) == {(0, "GPU0"): UNNAMED, (1, "GPU0"): UNNAMED}


def test_a_short_run_is_held_against_the_longer_ones() -> None:
    fleet = Fleet().add(steps()).add(steps(num=21, odd_at=20)).add(steps())
    (found,) = fleet.result().findings
    assert (found.run, found.step) == (1, 20)


def test_a_gpu_has_one_vote_however_often_it_ran() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.add(steps(odd_at=7), uuids=["GPU-odd"], host="a")
    for number in range(2):
        fleet.add(steps(), uuids=[f"GPU-{number}"])
    result = fleet.result()
    # Its host's software may be the cause: no other GPU of it was compared.
    assert named(result) == {(number, "GPU0"): SUSPECT for number in range(5)}
    assert "in several runs, with one vote each: 1 GPU" in result.notes


def test_a_gpu_that_is_odd_twice_beside_a_right_one_is_to_be_isolated() -> None:
    fleet = Fleet().add(steps()).add(steps())
    fleet.add(steps(odd_at=7, salt=1), steps(), uuids=["GPU-odd", "GPU-beside"])
    fleet.add(steps(odd_at=9, salt=2), uuids=["GPU-odd"])
    result = fleet.result()
    again = ("bits", "FAIL", "ISOLATE", 21)
    assert named(result) == {(2, "GPU0"): again, (3, "GPU0"): again}
    assert {each.repeat for each in result.findings} == {Repeat.PERSISTENT}


def test_a_gpu_that_is_odd_in_two_hosts_is_to_be_isolated() -> None:
    fleet = Fleet().add(steps()).add(steps())
    fleet.add(steps(odd_at=7), uuids=["GPU-odd"], host="a")
    fleet.add(steps(odd_at=7), uuids=["GPU-odd"], host="b")
    assert {each[2] for each in named(fleet.result()).values()} == {"ISOLATE"}
    # Of pods nobody knows the machine.
    fleet.runs[2:] = [asked(run, scheduler="kubernetes") for run in fleet.runs[2:]]
    assert {each[2] for each in named(fleet.result()).values()} == {"MONITOR"}


def test_what_to_do_names_the_machine_and_the_gpu() -> None:
    fleet = Fleet().add(steps()).add(steps())
    assert fleet.result().do_now == "Nothing: no GPU stands apart."
    fleet.add(steps(odd_at=7), uuids=["GPU-odd"], host="a")
    assert fleet.result().do_now.startswith("See the report of ")
    fleet.add(steps(odd_at=7), uuids=["GPU-odd"], host="b")
    out = "Take out of service: a GPU0, b GPU0. "
    assert fleet.result().do_now.startswith(out)
    fleet.runs[2:] = [asked(run, drill="flip@7:GPU0") for run in fleet.runs[2:]]
    assert fleet.result().do_now == "Nothing: these are drills."


def test_of_a_job_with_other_bits_no_rank_is_named_nor_cleared() -> None:
    """Its ranks sum what they computed: the wrong sum of one is in the bits of all."""
    fleet = Fleet()
    for number in range(3):
        events = steps(odd_at=7 if number == 1 else None)
        fleet.add(events, events, events, mode="ddp")
    result = fleet.result()
    assert named(result) == {(1, f"GPU{at}"): UNNAMED for at in range(3)}
    assert "2 equal jobs" in result.findings[0].what
    assert result.groups[0].devices == 9


def test_a_rank_that_parts_from_its_own_job_first_is_named() -> None:
    fleet = Fleet()
    for _ in range(3):
        fleet.add(steps(), steps(), mode="ddp")
    fleet.add(steps(odd_at=7), steps(odd_at=8, salt=2), mode="ddp")
    assert named(fleet.result()) == {(3, "GPU0"): SUSPECT}


def test_two_jobs_that_differ_have_no_majority_however_many_ranks_they_have() -> None:
    fleet = Fleet().add(*[steps()] * 4, mode="ddp", part=part("4711.0", 0))
    fleet.add(steps(odd_at=7), mode="ddp", part=part("4712.0", 0))
    assert {each[:2] for each in named(fleet.result()).values()} == {("bits", "INCONCLUSIVE")}


def test_of_a_job_that_has_named_a_rank_the_others_are_not_told() -> None:
    row = {"verdict": Verdict.SUSPECT, "severity": Severity.MONITOR}
    fleet = Fleet().add(steps(), steps(), mode="ddp").add(steps(), steps(), mode="ddp")
    odd = steps(odd_at=7)
    fleet.add(odd, odd, mode="ddp", rows=[row, {}], **NAMED)
    assert {place: each[1] for place, each in named(fleet.result()).items()} == {
        (2, "GPU0"): "SUSPECT"
    }


def part(job: str, node: int) -> JobPart:
    return JobPart(number=node, name=f"n{node}", job=job, num_ranks=4, ranks={}, hosts={})


def test_a_job_on_several_nodes_has_one_vote() -> None:
    fleet = Fleet()
    for job in ("4711.0", "4712.0"):
        events = steps(odd_at=7 if job == "4711.0" else None)
        for node in range(2 if job == "4711.0" else 1):
            fleet.add(events, events, mode="ddp", part=part(job, node))
    result = fleet.result()
    assert {each[:2] for each in named(result).values()} == {("bits", "INCONCLUSIVE")}
    assert all("no majority" in each.what for each in result.findings)
    fleet.add(steps(), steps(), mode="ddp", part=part("4713.0", 0))
    result = fleet.result()
    assert named(result) == {(run, f"GPU{at}"): UNNAMED for run in range(2) for at in range(2)}
    assert "2 equal jobs" in result.findings[0].what


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_gpus_of_two_nodes_that_ran_several_jobs_vote_job_by_job(odd: int) -> None:
    fleet = Fleet()
    for number in range(3):
        for node in range(2):
            events = steps(odd_at=7 if number == odd else None)
            fleet.add(events, uuids=[f"GPU-{node}"], mode="ddp", part=part(f"{number}.0", node))
    result = fleet.result()
    assert named(result) == {(2 * odd + node, "GPU0"): UNNAMED for node in range(2)}
    assert "2 equal jobs" in result.findings[0].what


def test_one_gpu_a_node_is_not_alone_in_a_job_of_several() -> None:
    """Of a model that ranks share, each has other tensors."""
    fleet = Fleet()
    for node in range(2):
        fleet.add(steps(), data=f"shard {node}", mode="ddp", part=part("4711.0", node))
    assert fleet.result().exit_code == 0
    # As wide a job that is alone: its ranks were compared with each other.
    fleet = Fleet()
    for node in range(2):
        fleet.add(steps(), mode="ddp", part=part("4711.0", node))
    assert f"equal bit for bit in {2 * NUM_STEPS} steps" in fleet.result().summary


def test_of_a_job_that_another_node_ended_that_node_alone_is_to_blame() -> None:
    dead: dict[str, Any] = {"verdict": Verdict.FAIL, "exit_code": 7}
    failed = {"verdict": Verdict.FAIL, "returncode": 7, "cause": "exit code 7"}
    ended = Elsewhere(node="n1", worker="GPU0", cause="exit code 7", exit_code=7)
    here: dict[str, Any] = {
        "summary": "GPU0 on n1 failed first",
        "part": part("4711.0", 0),
        "elsewhere": ended,
    }
    fleet = Fleet().add(steps(9), mode="ddp", rows=[{"verdict": Verdict.STOPPED}], **dead, **here)
    # The run of that node is not here: all that is known is what this one heard.
    assert named(fleet.result()) == {(0, None): ("run", "FAIL", None, 7)}
    there: dict[str, Any] = {"culprits": ["GPU0"], "part": part("4711.0", 1)}
    fleet.add(steps(9), mode="ddp", rows=[failed], **there, **dead)
    result = fleet.result()
    assert named(result) == {
        (1, "GPU0"): ("run", "FAIL", None, 7),
        (0, None): ("run", "STOPPED", "IGNORE", 0),
    }
    assert (result.exit_code, result.runs[0].verdict) == (7, Verdict.STOPPED)
    # Two that did not hear each other: neither is cleared by the other.
    fleet.runs = [
        replace(run, result=replace(run.result, culprits=[], workers=[])) for run in fleet.runs
    ]
    assert {each[3] for each in named(fleet.result()).values()} == {7}


def test_of_a_job_on_several_nodes_that_has_named_a_rank_the_others_are_not_told() -> None:
    row = {"verdict": Verdict.SUSPECT, "severity": Severity.MONITOR}
    fleet = Fleet()
    for job in ("4709.0", "4710.0"):
        fleet.add(steps(), mode="ddp", part=part(job, 0))
    fleet.add(steps(odd_at=7), mode="ddp", part=part("4711.0", 0))
    fleet.add(steps(odd_at=7), mode="ddp", part=part("4711.0", 1), rows=[row], **NAMED)
    assert {place: each[1] for place, each in named(fleet.result()).items()} == {
        (3, "GPU0"): "SUSPECT"
    }


def test_one_gpu_in_several_runs_is_its_own_peer() -> None:
    same: dict[str, Any] = {"uuids": ["GPU-a"]}
    fleet = Fleet().add(steps(), **same).add(steps(odd_at=7), **same).add(steps(), **same)
    assert named(fleet.result()) == {(1, "GPU0"): SUSPECT}


def test_one_gpu_that_is_wrong_in_the_same_way_twice_is_not_excused_by_itself() -> None:
    fleet = Fleet()
    for number in range(5):
        odd_at = 7 if number in (1, 3) else None
        fleet.add(steps(odd_at=odd_at), uuids=["GPU-a"], host="a")
    assert named(fleet.result()) == {(1, "GPU0"): SUSPECT, (3, "GPU0"): SUSPECT}


def test_the_same_wrong_bits_on_two_devices_are_no_gpus() -> None:
    fleet = Fleet().add(steps(odd_at=7), steps(odd_at=7)).add(steps(), steps()).add(steps())
    result = fleet.result()
    software = ("bits", "INVALID", "IGNORE", 2)
    assert named(result) == {(0, "GPU0"): software, (0, "GPU1"): software}
    assert result.findings[0].cause_class is CauseClass.SOFTWARE


def test_only_equals_are_compared_and_what_differs_is_told() -> None:
    fleet = Fleet().add(steps()).add(steps()).add(steps(odd_at=3), driver="570")
    result = fleet.result()
    assert named(result) == {(2, "GPU0"): ("not compared", "INCONCLUSIVE", "IGNORE", 75)}
    assert "driver 580 there, 570 here" in result.findings[0].what
    assert [str(other) for other in result.groups[1].others] == ["driver 580 there, 570 here"]
    # Where its own run has peers, it was compared.
    peers = Fleet().add(steps()).add(steps()).add(steps(), steps(), driver="570")
    assert named(peers.result()) == {}
    assert any(note.startswith("apart: 2 workers of 1 run") for note in peers.result().notes)


@pytest.mark.parametrize("gone", [False, True])
def test_other_first_weights_are_no_fault(gone: bool) -> None:
    def drawn(value: str) -> list[Event]:
        first, *rest = steps()
        assert isinstance(first, Step)
        return [replace(first, fp={"before.weights": value}, loss=f"0x1.{value}p+0"), *rest]

    fleet = Fleet().add(drawn("1")).add(drawn("1")).add(drawn("2"))
    if gone:
        fleet.events = {place: [] for place in fleet.events}
    result = fleet.result()
    (found,) = result.findings
    assert (found.seen, found.exit_code, found.run) == ("not compared", 75, 2)
    assert "first_state" in found.what
    assert any(note.startswith("apart: 1 worker of 1 run: first_state") for note in result.notes)


def test_an_evaluation_behind_the_last_step_is_compared() -> None:
    def told(loss: float) -> Evaluation:
        return Evaluation(step=NUM_STEPS, split="valid", loss=loss.hex(), tokens=1)

    fleet = Fleet().add([*steps(), told(1.0)]).add([*steps(), told(1.5)]).add([*steps(), told(1.0)])
    fleet.add(steps())  # it was stopped before
    (found,) = fleet.result().findings
    assert found.run == 1
    assert found.difference is not None
    assert found.difference.quantity == "validation loss of valid"


@pytest.mark.parametrize("at", [0, 13, NUM_STEPS - 1])
def test_where_events_are_gone_the_links_tell_between_which_steps(at: int) -> None:
    fleet = Fleet().add(steps()).add(steps(odd_at=at)).add(steps())
    fleet.events = {place: [] for place in fleet.events}
    (found,) = fleet.result().findings
    assert (found.run, found.verdict, found.difference) == (1, Verdict.SUSPECT, None)
    assert found.step is not None
    assert at <= found.step <= at + 1


def test_events_that_are_not_those_of_the_report_count_as_none() -> None:
    fleet = Fleet().add(steps()).add(steps(odd_at=9)).add(steps())
    fleet.events[1, "GPU0"] = steps(odd_at=2)
    (found,) = fleet.result().findings
    assert found.difference is None
    assert found.step in (9, 10)


def test_a_tie_of_one_run_is_settled_by_the_fleet() -> None:
    row = {"verdict": Verdict.INCONCLUSIVE, "severity": Severity.MONITOR, "cause": "differs"}
    fleet = Fleet().add(
        steps(num=10, odd_at=9),
        steps(num=10),
        rows=[row, row],
        verdict=Verdict.INCONCLUSIVE,
        exit_code=23,
        summary="workers differ",
    )
    result = fleet.add(steps(), steps()).result()
    assert named(result) == {(0, "GPU0"): SUSPECT}
    assert [worker.verdict for worker in result.runs[0].workers] == ["SUSPECT", "PASS"]


def test_against_a_majority_of_its_run_and_with_the_fleet_nobody_is_named() -> None:
    row = {"verdict": Verdict.SUSPECT, "cause": "differs from the majority"}
    fleet = Fleet().add(
        steps(num=10),
        steps(num=10, odd_at=9),
        steps(num=10, odd_at=9),
        rows=[row, {}, {}],
        **NAMED,
    )
    fleet.add(steps(), steps()).add(steps(), steps())
    told = named(fleet.result())
    assert told[0, "GPU0"] == UNNAMED
    assert told[0, "GPU1"][1] == told[0, "GPU2"][1] == "INVALID"


@pytest.mark.parametrize("repeat", [Repeat.NOT_REPLAYED, Repeat.PERSISTENT])
def test_a_golden_file_that_no_node_equals_condemns_none(repeat: Repeat) -> None:
    """Each is the only worker of its run, so each run names its own."""
    row = {"verdict": Verdict.FAIL, "severity": Severity.ISOLATE, "repeat": repeat}
    worded = {**row, "cause": "differs from golden g.json at step 7"}
    unlike = Disagreement(7, "loss", {"golden": "1", "GPU0": "2"})
    golden = GoldenResult(
        file="g.json",
        source=Source(
            run_dir=None,
            host="h",
            started_at=datetime(2026, 1, 1, tzinfo=UTC),
            workers=["GPU0"],
            versions={},
        ),
        workers=[Standing(name="GPU0", steps=9, equal_steps=7, disagreement=unlike)],
    )
    run: dict[str, Any] = {"rows": [worded], "golden": golden, **NAMED, "verdict": Verdict.FAIL}
    fleet = Fleet()
    for _ in range(3):
        fleet.add(steps(9), **run)
    result = fleet.result()
    assert set(named(result).values()) == {("bits", "INVALID", "IGNORE", 2)}
    assert "2 equals in the fleet" in result.findings[0].what
    # Where one alone came to that step, nothing is known of the others.
    condemned = ("run", "FAIL", "ISOLATE", 21)
    fleet = Fleet().add(steps(9), **run).add(steps(5)).add(steps(5))
    assert named(fleet.result()) == {(0, "GPU0"): condemned}
    # A bad GPU that is alone in all of its runs gives the same bits each time.
    fleet = Fleet()
    for _ in range(3):
        fleet.add(steps(9), uuids=["GPU-a"], **run)
    assert {*named(fleet.result()).values()} == {condemned}


def test_what_a_replay_has_shown_stands() -> None:
    row = {
        "verdict": Verdict.FAIL,
        "severity": Severity.ISOLATE,
        "cause_class": CauseClass.HARDWARE,
        "repeat": Repeat.PERSISTENT,
        "cause": "differs",
    }
    fleet = Fleet().add(
        *(steps(odd_at=4), steps(), steps()),
        rows=[row, {}, {}],
        verdict=Verdict.FAIL,
        exit_code=21,
        culprits=["GPU0"],
    )
    result = fleet.add(steps()).result()
    (found,) = result.findings
    assert (found.severity, found.repeat) == (Severity.ISOLATE, Repeat.PERSISTENT)
    assert found.what == "differs; other bits than 3 equal devices of the fleet, too"


def test_what_its_run_and_the_fleet_say_of_a_worker_is_one_finding() -> None:
    row = {"verdict": Verdict.SUSPECT, "severity": Severity.MONITOR, "cause": "differs in a tensor"}
    fleet = Fleet().add(
        *(steps(odd_at=4), steps(), steps()),
        rows=[row, {}, {}],
        **NAMED,
    )
    result = fleet.add(steps()).result()
    assert named(result) == {(0, "GPU0"): SUSPECT}
    assert result.findings[0].what.startswith("differs in a tensor; other bits than 3")


def nan_run(fleet: Fleet, num: int) -> Fleet:
    row = {
        "verdict": Verdict.SUSPECT,
        "severity": Severity.MONITOR,
        "returncode": 20,
        "cause": "NaN",
    }
    return fleet.add(steps(num=num), rows=[row], verdict=Verdict.SUSPECT, exit_code=20)


def test_a_nan_where_the_fleet_was_finite_is_the_hardwares() -> None:
    fleet = nan_run(Fleet().add(steps()).add(steps()), 11)
    result = fleet.result()
    assert named(result) == {(2, "GPU0"): ("nonfinite", "FAIL", "ISOLATE", 20)}
    assert result.findings[0].step == 11


def test_a_gpu_is_no_peer_of_its_own_nan() -> None:
    nan = {"verdict": Verdict.FAIL, "severity": Severity.MONITOR, "returncode": 20}
    fleet = Fleet().add(steps(9), uuids=["GPU-a"], rows=[nan], verdict=Verdict.FAIL, exit_code=20)
    fleet.add(steps(), uuids=["GPU-a"]).add(steps())
    assert named(fleet.result()) == {(0, "GPU0"): ("run", "FAIL", "MONITOR", 20)}
    fleet.add(steps())
    assert named(fleet.result()) == {(0, "GPU0"): ("nonfinite", "FAIL", "ISOLATE", 20)}
    assert "2 equals in the fleet" in fleet.result().findings[0].what


def test_a_nan_of_two_devices_in_the_same_step_condemns_neither() -> None:
    fleet = nan_run(nan_run(Fleet(), 11), 11)
    for _ in range(9):
        fleet.add(steps())
    assert {each[0] for each in named(fleet.result()).values()} == {"run"}


def test_a_nan_of_a_job_condemns_none_of_its_ranks() -> None:
    row = {"verdict": Verdict.FAIL, "severity": Severity.IGNORE, "returncode": 20, "cause": "NaN"}
    fleet = Fleet()
    for _ in range(3):
        fleet.add(steps(), steps(), mode="ddp")
    fleet.add(*[steps(11)] * 2, mode="ddp", rows=[row] * 2, verdict=Verdict.FAIL, exit_code=20)
    assert {each[0] for each in named(fleet.result()).values()} == {"run"}


def test_what_else_a_run_has_found_of_an_odd_worker_or_a_tie_is_not_lost() -> None:
    warned = {"verdict": Verdict.WARN, "severity": Severity.MONITOR, "cause": "corrected errors"}
    fleet = Fleet().add(steps()).add(steps(odd_at=7), rows=[warned]).add(steps())
    assert {each.seen for each in fleet.result().findings} == {"bits", "run"}
    row = {"verdict": Verdict.INCONCLUSIVE, "severity": Severity.MONITOR, "cause": "differs"}
    ecc = {"verdict": Verdict.FAIL, "severity": Severity.ISOLATE, "cause": "uncorrected ECC"}
    tie: dict[str, Any] = {
        "verdict": Verdict.INCONCLUSIVE,
        "exit_code": 23,
        "summary": "workers differ",
    }
    fleet = Fleet().add(steps()).add(steps()).add(steps(), steps(odd_at=7), rows=[ecc, row], **tie)
    assert named(fleet.result())[2, "GPU0"] == ("run", "FAIL", "ISOLATE", 23)


def test_a_tie_that_is_settled_does_not_hide_that_the_run_has_no_end() -> None:
    row = {"verdict": Verdict.INCONCLUSIVE, "cause": "differs"}
    fleet = Fleet().add(steps()).add(steps())
    fleet.add(
        *(steps(), steps(odd_at=7)),
        rows=[row, row],
        verdict=Verdict.INCONCLUSIVE,
        exit_code=23,
        is_dead=True,
    )
    assert named(fleet.result())[2, None] == ("dead", "INCONCLUSIVE", "MONITOR", 23)


def test_a_nan_of_all_is_nobodys() -> None:
    fleet = nan_run(nan_run(nan_run(Fleet(), 11), 11), 11)
    assert {each[0] for each in named(fleet.result()).values()} == {"run"}


def test_slow_workers_are_named_and_fail_only_where_it_was_asked() -> None:
    fleet = Fleet()
    for number in range(12):
        slow = 1.3 if number == 4 else 1.1 if number == 5 else 1.0
        fleet.add(steps(slow=slow))
    result = fleet.result()
    assert named(result) == {(4, "GPU0"): ("slow", "WARN", "MONITOR", 0)}
    assert (result.verdict, result.exit_code) == (Verdict.WARN, 0)
    assert "1.30 x its equals in the fleet since step 5" in result.findings[0].what
    assert result.runs[4].workers[0].speed == pytest.approx(1 / 1.3, abs=0.01)
    fleet.runs[4] = asked(fleet.runs[4], fail_on=["speed"])
    assert fleet.result().exit_code == 22


def test_single_slow_steps_and_two_workers_name_nobody() -> None:
    fleet = Fleet()
    for number in range(6):
        events = steps()
        if number == 2:
            events[10::7] = [replace(e, busy_ms=900.0) for e in events[10::7]]
        fleet.add(events)
    assert fleet.result().findings == []
    assert Fleet().add(steps()).add(steps(slow=3.0)).result().findings == []


def test_a_dead_run_and_one_that_failed_are_told_once_each() -> None:
    fleet = Fleet().add(steps()).add(steps())
    dead: dict[str, Any] = {
        "verdict": Verdict.INCONCLUSIVE,
        "exit_code": 75,
        "summary": "it is empty",
    }
    fleet.add(is_dead=True, **dead)
    fleet.add(verdict=Verdict.FAIL, exit_code=2, summary="no such preset")
    result = fleet.result()
    assert named(result) == {
        (2, None): ("dead", "INCONCLUSIVE", "MONITOR", 75),
        (3, None): ("run", "FAIL", None, 2),
    }


def test_that_a_worker_is_alone_hides_no_failure_of_its_run() -> None:
    stopped = [{"verdict": Verdict.STOPPED}]
    ended: dict[str, Any] = {
        "verdict": Verdict.INCONCLUSIVE,
        "exit_code": 143,
        "summary": "SIGTERM received",
    }
    fleet = Fleet().add(steps()).add(steps())
    fleet.add(steps(9), driver="570", rows=stopped, **ended)
    result = fleet.result()
    assert named(result) == {
        (2, None): ("run", "INCONCLUSIVE", None, 143),
        (2, "GPU0"): ("not compared", "INCONCLUSIVE", "IGNORE", 75),
    }
    assert result.exit_code == 143


def test_the_exit_code_is_that_of_the_gravest() -> None:
    def row(verdict: Verdict, severity: Severity) -> list[dict[str, Any]]:
        return [{"verdict": verdict, "severity": severity, "cause": "x"}]

    fleet = Fleet().add(steps(), rows=row(Verdict.SUSPECT, Severity.MONITOR), exit_code=21)
    fleet.add(steps(), rows=row(Verdict.FAIL, Severity.RESET), exit_code=22)
    fleet.add(verdict=Verdict.INCONCLUSIVE, exit_code=130, summary="stopped by SIGINT")
    result = fleet.result()
    assert [f.exit_code for f in result.findings] == [22, 21, 130]
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 22)


def test_hundreds_that_all_differ_take_bounded_work_and_condemn_nobody() -> None:
    fleet = Fleet()
    for number in range(400):
        fleet.add(steps(odd_at=number % NUM_STEPS, salt=number + 1))
    result = fleet.result()
    assert {f.verdict for f in result.findings} <= {Verdict.INCONCLUSIVE, Verdict.SUSPECT}
    assert fleet.num_read <= 300
