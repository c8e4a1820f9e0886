"""`report DIR ...`: run directories on disk, whole, damaged and hostile, as one report."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import fleet as synthetic
from launcher import run_dir
from launcher.report.rebuild import rebuild
from model_check.errors import UsageError
from tests.launcher.report.report_schema import faults

ROOT = Path(__file__).parents[3]
HEALTHY = synthetic.Planned({}, {}, [])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five nodes: in node 2 GPU 1 is odd from step 9 on, node 4 is slow."""
    place = tmp_path_factory.mktemp("fleet")
    plan = synthetic.Planned({2: (1, 9)}, {4: 3}, [])
    synthetic.write_fleet(place, 5, plan, num_steps=30, num_gpus=4)
    return place


@pytest.fixture
def fleet(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    subprocess.run(["cp", "-r", written, tmp_path / "fleet"], check=True)
    return tmp_path / "fleet"


class Said(list[str]):
    @property
    def text(self) -> str:
        return "\n".join(self)


def report(*argv: object) -> tuple[int, Said]:
    said = Said()
    return rebuild([str(each) for each in argv], said.append), said


def document(place: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((place / "fleet.json").read_text())
    return read


def named(place: Path) -> set[tuple[str, str, str | None]]:
    return {
        (f["seen"], Path(f["directory"]).name, f["worker"]) for f in document(place)["findings"]
    }


FOUND = {("bits", "node0002", "GPU1"), ("slow", "node0004", "GPU3")}


def test_a_directory_that_holds_runs_is_all_of_them(fleet: Path) -> None:
    code, said = report(fleet)
    assert code == 21
    assert named(fleet) == FOUND
    assert f"[launcher] {fleet}: 5 run directories in it" in said
    (line,) = [line for line in said if "SUSPECT MONITOR" in line]
    for part in ("node0002 GPU1", synthetic.uuid_of(2, 1), "bus 0000:1a:00.0", "serial", "step 9"):
        assert part in line
    assert said[-1].startswith("[launcher] SUSPECT: 5 runs, 20 workers: 1 with other bits, 1 slow")
    assert said[-1].endswith("(exit code 21)")


def test_it_holds_to_its_published_schema(fleet: Path) -> None:
    report(fleet)
    assert (document(fleet)["schema"], document(fleet)["kind"]) == (run_dir.SCHEMA, "fleet")
    assert faults(document(fleet), "fleet") == []


def test_runs_that_are_named_have_their_report_where_it_was_asked(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [fleet / f"node000{n}" for n in (0, 1, 2)]
    report(*runs, "--output", tmp_path / "out")
    assert named(tmp_path / "out") == {("bits", "node0002", "GPU1")}
    page = (tmp_path / "out" / "fleet.html").read_text()
    assert 'href="../fleet/node0001/report.html"' in page
    monkeypatch.chdir(tmp_path)
    report(*runs)
    assert 'href="fleet/node0001/report.html"' in (tmp_path / "fleet.html").read_text()


def test_runs_of_an_older_version_are_merged_by_their_events(fleet: Path) -> None:
    synthetic.without_traces(fleet)
    report(fleet)
    assert named(fleet) == FOUND


def test_runs_whose_events_are_gone_are_merged_by_their_reports(fleet: Path) -> None:
    for path in fleet.glob("*/*.events.jsonl"):
        path.unlink()
    report(fleet)
    assert named(fleet) == FOUND
    (odd,) = [f for f in document(fleet)["findings"] if f["seen"] == "bits"]
    assert odd["step"] in (9, 10)


def test_a_report_that_is_missing_is_made_again(fleet: Path) -> None:
    for name in ("report.json", "report.html"):
        (fleet / "node0001" / name).unlink()
    report(fleet)
    assert named(fleet) == FOUND
    assert (fleet / "node0001" / "report.html").is_file()


def test_a_run_counts_once_however_often_it_is_given(fleet: Path) -> None:
    subprocess.run(["cp", "-r", fleet / "node0002", fleet / "copy"], check=True)
    runs = [fleet / "node0002", fleet / "node0000", fleet / "node0001", fleet / "copy"]
    _, said = report(*runs, fleet / "node0000" / ".." / "node0000", "--output", fleet)
    assert len(document(fleet)["runs"]) == 3
    assert named(fleet) == {("bits", "node0002", "GPU1")}
    assert f"{fleet / 'copy'}: the same run as {fleet / 'node0002'}: counts once" in said.text


def test_a_copy_that_was_made_too_early_hides_no_end(fleet: Path) -> None:
    early = fleet / "a_snapshot"
    subprocess.run(["cp", "-r", fleet / "node0001", early], check=True)
    for name in ("report.json", "report.html"):
        (early / name).unlink()
    record = json.loads((early / "run.json").read_text())
    for name in ("end", "ended", "duration_s"):
        del record[name]
    (early / "run.json").write_text(json.dumps(record))
    _, said = report(fleet)
    assert named(fleet) == FOUND
    assert f"{early}: the same run as {fleet / 'node0001'}: counts once" in said.text


@pytest.mark.parametrize("name", ["run.json", "launcher.log"])
def test_a_run_hides_none_of_those_below_it(fleet: Path, name: str) -> None:
    """A first run had the holder itself as its directory; somebody's log lies there."""
    (fleet / name).write_bytes(b"")
    (fleet / "node0002").rename(fleet / "node0001" / "again")
    (fleet / "node0001" / "dossier" / "gpu0").mkdir(parents=True)
    (fleet / "never").mkdir()
    _, said = report(fleet)
    found = {("bits", "again", "GPU1"), ("slow", "node0004", "GPU3"), ("dead", "never", None)}
    own = {("dead", fleet.name, None)} if name == "run.json" else set()
    assert named(fleet) == found | own
    assert f"[launcher] {fleet}: {6 + len(own)} run directories in it" in said


def test_what_the_shell_names_beside_the_runs_is_left_out(fleet: Path, tmp_path: Path) -> None:
    report(fleet)
    code, said = report(*sorted(fleet.iterdir()), "--output", tmp_path / "out")
    assert (code, named(tmp_path / "out")) == (21, FOUND)
    assert "[launcher] 2 files were named that are no run directories: left out" in said
    with pytest.raises(UsageError, match=r"fleet\.html: a file, no run directory"):
        report(fleet / "fleet.html", fleet / "fleet.json")


def dead(fleet: Path, name: str) -> Iterator[tuple[str, str]]:
    """Make the run `name` one that tells nothing; what is to be said of it."""
    directory = fleet / name
    (directory / "report.json").unlink()
    record = directory / "run.json"
    content = json.loads(record.read_text())
    yield "cut", "damaged"
    record.write_bytes(record.read_bytes()[:200])
    yield "older", "another version (schema 7)"
    record.write_text(json.dumps(content | {"schema": 7}))
    yield "no end", "it has no end: it was killed, or still goes on on node0003"
    record.write_text(json.dumps({k: v for k, v in content.items() if k not in ("end", "ended")}))
    yield "no run.json", "not a run directory"
    record.unlink()
    yield "no permission to guess", "it is empty: its run never began"
    for path in directory.iterdir():
        path.unlink()
    yield "gone", "it cannot be read: No such file or directory"
    directory.rmdir()


def test_a_dead_node_is_named_and_why(fleet: Path) -> None:
    others = [fleet / f"node000{n}" for n in (0, 1, 2)]
    states = dead(fleet, "node0003")
    told = [next(states)]
    for each in states:
        code, said = report(*others, fleet / "node0003", "--output", fleet)
        assert ("dead", "node0003", None) in named(fleet), told[-1]
        (line,) = [line for line in said if "node0003" in line]
        assert told[-1][1] in line, told[-1]
        assert code == 21
        told.append(each)
    assert len(told) == 6


def test_a_run_that_is_still_going_is_not_dead(fleet: Path) -> None:
    place = fleet / "node0003"
    (place / "report.json").unlink()
    record = json.loads((place / "run.json").read_text())
    for key in ("end", "ended"):
        record.pop(key)
    # A launcher, by its command line.
    going = subprocess.Popen(["bash", "-c", "read", "launcher"], stdin=subprocess.PIPE)
    try:
        record |= {"pid": going.pid, "host": os.uname().nodename}
        (place / "run.json").write_text(json.dumps(record))
        report(fleet)
    finally:
        going.communicate()
    assert ("run", "node0003", None) in named(fleet)
    assert not (place / "report.json").exists()


def test_two_rows_of_one_name_are_no_report(fleet: Path) -> None:
    """Prometheus would refuse the whole file."""
    path = fleet / "node0003" / "report.json"
    path.write_text(path.read_text().replace('"GPU1"', '"GPU0"'))
    report(fleet, "--prometheus", fleet / "x.prom")
    assert named(fleet) == FOUND
    assert samples_of(fleet / "x.prom")


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 7},
        {"kind": "rounds"},
        {"exit_code": 256},
        {"run": {}},
        {"workers": [{"name": "GPU0"}]},
        {"disagreement": {"step": 1 << 80, "quantity": "loss", "bits": {"a": "1", "b": "2"}}},
    ],
)
def test_a_report_that_cannot_be_used_is_made_again(fleet: Path, changes: dict[str, Any]) -> None:
    path = fleet / "node0003" / "report.json"
    right = json.loads(path.read_text())
    path.write_text(json.dumps(right | changes))
    report(fleet)
    assert named(fleet) == FOUND
    assert json.loads(path.read_text())["run"] == right["run"]


def test_a_gpu_whose_identity_is_no_text_is_none(fleet: Path) -> None:
    path = fleet / "node0003" / "report.json"
    content = json.loads(path.read_text())
    content["workers"][0]["gpu"]["uuid"] = 5
    path.write_text(json.dumps(content))
    (fleet / "node0003" / "run.json").write_text("{}")
    report(fleet)
    assert named(fleet) == {*FOUND, ("dead", "node0003", None)}


@pytest.mark.parametrize("what", ["fifo", "huge", "deep", "link", "directory", "text"])
def test_what_somebody_planted_in_place_of_a_report_stops_nothing(fleet: Path, what: str) -> None:
    place = fleet / "node0003" / "report.json"
    place.unlink()
    match what:
        case "fifo":
            os.mkfifo(place)
        case "huge":
            place.touch()
            os.truncate(place, 1 << 40)
        case "deep":
            place.write_text("[" * 1_000_000)
        case "link":
            place.symlink_to("/dev/zero")
        case "directory":
            place.mkdir()
        case "text":
            place.write_text('{"schema": 1, "workers": "\\ud800"}')
    (fleet / "node0003" / "run.json").write_text("{}")
    report(fleet)
    assert named(fleet) == {*FOUND, ("dead", "node0003", None)}


def spoiled(fleet: Path, **changes: Any) -> None:
    """Of node 2, whose GPU 1 is odd."""
    path = fleet / "node0002" / "report.json"
    content = json.loads(path.read_text())
    content["run"] |= changes
    path.write_text(json.dumps(content))


EVIL = "x'; touch evil; $(touch evil) `touch evil`\n--all\x1b[2J\"<script>alert(1)</script>"


def test_hostile_names_are_text_everywhere(fleet: Path) -> None:
    spoiled(fleet, host=EVIL, node=EVIL)
    path = fleet / "node0002" / "report.json"
    content = json.loads(path.read_text())
    content["workers"][1] |= {"severity": "ISOLATE", "verdict": "FAIL", "cause": EVIL}
    path.write_text(json.dumps(content | {"exit_code": 22, "culprits": ["GPU1"]}))
    _, said = report(fleet, "--drain", "--prometheus", fleet / "x.prom")
    assert "<script" not in (fleet / "fleet.html").read_text()
    assert "\x1b" not in said.text
    assert "scontrol" not in said.text  # that is no name of a node
    assert "kubectl" not in said.text
    samples = samples_of(fleet / "x.prom")
    assert any(labels["host"].endswith("</script>") for _, labels, _ in samples if "host" in labels)


def test_a_worker_whose_name_is_a_path_is_not_followed(fleet: Path) -> None:
    path = fleet / "node0003" / "report.json"
    path.write_text(path.read_text().replace('"GPU0"', '"../../GPU0"'))
    (fleet / "node0003" / "run.json").write_text("{}")
    report(fleet)
    assert ("dead", "node0003", None) in named(fleet)


def condemned(fleet: Path, scheduler: str | None, node: str | None) -> None:
    path = fleet / "node0002" / "report.json"
    content = json.loads(path.read_text())
    content["run"] |= {"scheduler": scheduler, "node": node}
    content["workers"][1] |= {
        "severity": "ISOLATE",
        "verdict": "FAIL",
        "cause": 'uncorrected ECC: it\'s 3 "times" $HOME',
    }
    path.write_text(json.dumps(content | {"exit_code": 22, "culprits": ["GPU1"]}))


def script(said: Said) -> str:
    return "\n".join(line for line in said.text.splitlines() if not line.startswith("[launcher]"))


def ran(text: str, tmp_path: Path) -> list[list[str]]:
    """What a shell would run of it."""
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("scontrol", "kubectl"):
        (tools / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@"; echo\n')
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-s"], input=text, text=True, capture_output=True, env=env, check=True
    )
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def test_drain_prints_what_slurm_takes_and_runs_nothing(fleet: Path, tmp_path: Path) -> None:
    condemned(fleet, "slurm", "gpu-a01")
    _, said = report(fleet, "--drain")
    ((*command, reason),) = ran(script(said), tmp_path)
    assert command == ["scontrol", "update", "NodeName=gpu-a01", "State=DRAIN"]
    assert reason.startswith(f"Reason=model_check: GPU1 ({synthetic.uuid_of(2, 1)}")
    assert 'it\'s 3 "times" $HOME' in reason
    assert "\n" not in reason
    for line in script(said).splitlines():
        shlex.split(line, comments=True)


def test_drain_prints_what_kubernetes_takes(fleet: Path, tmp_path: Path) -> None:
    condemned(fleet, "kubernetes", "ip-10-0-0-7.ec2.internal")
    _, said = report(fleet, "--drain")
    commands = ran(script(said), tmp_path)
    assert [each[:2] for each in commands] == [
        ["kubectl", "cordon"],
        ["kubectl", "annotate"],
        ["kubectl", "drain"],
    ]
    assert all("ip-10-0-0-7.ec2.internal" in each for each in commands)


def test_drain_without_a_scheduler_has_both_and_a_pod_none(fleet: Path, tmp_path: Path) -> None:
    condemned(fleet, None, None)
    _, said = report(fleet, "--drain")
    assert {each[0] for each in ran(script(said), tmp_path)} == {"scontrol", "kubectl"}
    assert "NodeName=node0002" in script(said)
    condemned(fleet, "kubernetes", None)
    _, said = report(fleet, "--drain")
    assert all(line.startswith("#") for line in script(said).splitlines())
    assert "spec.nodeName" in script(said)


@pytest.mark.parametrize("name", ["ALL", "all", "n[1-9]", "a,b", "-l", "n;reboot"])
def test_drain_takes_no_name_for_more_than_a_node(fleet: Path, name: str) -> None:
    condemned(fleet, "slurm", name)
    _, said = report(fleet, "--drain")
    assert "is no name of a node" in said.text
    assert all(line.startswith("#") for line in script(said).splitlines())


def test_drain_finds_a_gpu_where_it_is_now(fleet: Path, tmp_path: Path) -> None:
    """Somebody put it into another machine, to see whether the fault goes with it."""
    condemned(fleet, "slurm", "first")
    path = fleet / "node0003" / "report.json"
    content = json.loads(path.read_text())
    content["workers"][0]["gpu"]["uuid"] = synthetic.uuid_of(2, 1)
    content["run"] |= {"node": "second", "started_at": "2026-01-02T00:00:00Z"}
    path.write_text(json.dumps(content))
    _, said = report(fleet, "--drain")
    ((*command, _),) = ran(script(said), tmp_path)
    assert "NodeName=second" in command
    assert f"# first: {synthetic.uuid_of(2, 1)} was in second later" in script(said)
    spoiled(fleet, started_at="2026-01-03T00:00:00Z")
    _, said = report(fleet, "--drain")
    assert ran(script(said), tmp_path)[0][2] == "NodeName=first"


def test_a_suspect_that_was_not_replayed_is_a_comment(fleet: Path) -> None:
    _, said = report(fleet, "--drain")
    lines = script(said).splitlines()
    assert all(line.startswith("#") for line in lines)
    assert any("not yet: node0002: GPU1" in line and line.endswith("GPU1") for line in lines)


def samples_of(path: Path) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(path.read_text())
    found = []
    for family in families:
        assert family.documentation
        assert family.type == "gauge"
        assert all(sample.timestamp is None for sample in family.samples)
        found += [(sample.name, sample.labels, sample.value) for sample in family.samples]
    keys = [(name, tuple(sorted(labels.items()))) for name, labels, _ in found]
    assert len(set(keys)) == len(keys)
    return found


def test_prometheus_reads_the_figures_of_a_fleet(fleet: Path) -> None:
    path = fleet / "model_check.prom"
    report(fleet, "--prometheus", path)
    samples = samples_of(path)
    values = {name: value for name, labels, value in samples if not labels}
    assert values["model_check_exit_code"] == 21
    odd = {"node": "node0002", "worker": "GPU1"}
    (verdict,) = [
        labels["verdict"]
        for name, labels, _ in samples
        if name == "model_check_worker_verdict" and odd.items() <= labels.items()
    ]
    assert verdict == "SUSPECT"
    speeds = [v for name, _, v in samples if name == "model_check_worker_speed_ratio"]
    assert len(speeds) == 20
    assert min(speeds) == pytest.approx(1 / 1.3, abs=0.02)
    assert not list(fleet.glob(".*.tmp"))


def test_no_two_directories_have_one_name_for_prometheus(fleet: Path) -> None:
    for number, name in enumerate(("a\nb", r"a\nb", r"a\\nb")):
        (fleet / f"node000{number}").rename(fleet / name)
        path = fleet / name / "report.json"
        content = json.loads(path.read_text())
        content["run"] |= {"host": "one", "node": "one"}
        path.write_text(json.dumps(content))
    report(fleet, "--prometheus", fleet / "x.prom")
    directories = {
        labels["run_dir"] for _, labels, _ in samples_of(fleet / "x.prom") if labels.get("run_dir")
    }
    assert len(directories) == 5


def test_prometheus_and_drain_work_for_one_run(fleet: Path) -> None:
    path = fleet / "one.prom"
    code, said = report(fleet / "node0000", "--prometheus", path, "--drain")
    assert code == 0
    assert not (fleet / "fleet.json").exists()
    assert [v for name, _, v in samples_of(path) if name == "model_check_run_exit_code"] == [0]
    assert script(said) == "# no node is to be drained: nothing here is ISOLATE or RESET"


def test_a_file_that_cannot_be_written_is_told_and_hides_no_verdict(fleet: Path) -> None:
    nowhere = fleet / "node0000" / "run.json" / "x.prom"
    code, said = report(fleet, "--prometheus", nowhere)
    assert code == 21
    assert said[-1].startswith(f"[launcher] error: {nowhere}: cannot be written")
    assert report(fleet / "node0000", "--prometheus", nowhere)[0] == 2


@pytest.mark.parametrize("what", ["fifo", "device", "directory"])
def test_figures_take_the_place_of_no_device_and_no_pipe(fleet: Path, what: str) -> None:
    place = fleet / "x.prom"
    match what:
        case "fifo":
            os.mkfifo(place)
        case "device":
            place.symlink_to("/dev/null")
        case "directory":
            place.mkdir()
    before = place.lstat().st_ino
    code, said = report(fleet / "node0000", "--prometheus", place)
    assert code == 2
    assert "cannot be written: " in said[-1]
    assert place.lstat().st_ino == before


def test_a_page_that_cannot_be_written_is_told_and_not_promised(fleet: Path) -> None:
    both = (fleet / "node0000", fleet / "node0001")
    code, said = report(*both, "--output", fleet / "node0000" / "run.json")
    assert code == 2
    assert "no report: " in said.text
    assert "page and report" not in said.text


def test_a_golden_file_is_held_against_those_that_can_be_read(fleet: Path) -> None:
    golden = fleet / "golden.json"
    report(fleet / "node0000", "--write-golden", golden)
    (fleet / "node0003" / "report.json").unlink()
    (fleet / "node0003" / "run.json").write_text("{")
    code, said = report(fleet, "--golden", golden)
    assert code == 21
    assert sum("equal in 30 of 30 steps" in line for line in said) == 4
    assert ("dead", "node0003", None) in named(fleet)


def test_what_may_not_be_entered_is_a_message(fleet: Path) -> None:
    """As one who is not root: the test's user may be."""
    script = (
        "import sys\n"
        "from launcher.report.rebuild import rebuild\n"
        "from model_check.errors import UsageError\n"
        "try: print(rebuild(sys.argv[1:], print))\n"
        "except UsageError as error: print(error)\n"
    )
    locked = fleet / "node0003"
    (fleet / "lead").symlink_to(locked / "inner")
    locked.chmod(0)
    caps = "-dac_override,-dac_read_search"
    lowered = ["setpriv", "--bounding-set", caps, "--inh-caps", caps] if os.geteuid() == 0 else []
    owner = 1234 if lowered else os.geteuid()
    if lowered:
        os.chown(locked, owner, owner)
    try:
        for path, part in ((locked, "Permission denied"), (fleet, "cannot be read: Permission")):
            done = subprocess.run(
                [*lowered, sys.executable, "-c", script, path],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            assert part in done.stdout, done
    finally:
        locked.chmod(0o755)


def test_where_all_nodes_are_dead_all_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "fleet" / name).mkdir(parents=True)
    code, _ = report(tmp_path / "fleet")
    assert code == 75
    assert named(tmp_path / "fleet") == {("dead", "a", None), ("dead", "b", None)}


def test_a_dead_run_counts_once_by_whatever_path(fleet: Path) -> None:
    (fleet / "dead").mkdir()
    (fleet / "also").symlink_to("dead")
    report(fleet / "dead", fleet / "also", fleet / "node0000", "--output", fleet)
    assert len(document(fleet)["runs"]) == 2


def test_in_a_directory_of_many_things_an_empty_one_is_no_dead_node(fleet: Path) -> None:
    for number, path in enumerate(sorted(fleet.iterdir())):
        path.rename(fleet / f"model_check_logs_{number}_20260101_000000")
    (fleet / "stranger").mkdir()
    (fleet / "model_check_logs_9_20260101_000000").mkdir()
    report(fleet)
    (dead,) = [name for seen, name, _ in named(fleet) if seen == "dead"]
    assert dead == "model_check_logs_9_20260101_000000"


def test_commands_alone_go_to_standard_output(fleet: Path) -> None:
    out, aside = Said(), Said()
    rebuild([str(fleet), "--drain"], out.append, aside.append)
    assert all(line.startswith("#") for line in out.text.splitlines())
    assert aside[-1].startswith("[launcher] SUSPECT")


def test_against_a_golden_file_each_run_is_made_again(fleet: Path) -> None:
    golden = fleet / "golden.json"
    report(fleet / "node0000", "--write-golden", golden)
    code, said = report(
        fleet / "node0000", fleet / "node0001", "--golden", golden, "--output", fleet
    )
    assert code == 0
    assert sum("equal in 30 of 30 steps" in line for line in said) == 2
    assert document(fleet)["verdict"] == "PASS"


def test_what_does_not_go_together_is_refused(fleet: Path) -> None:
    one, both = fleet / "node0000", (fleet / "node0000", fleet / "node0001")
    for argv, message in (
        ((one, "--output", fleet), "--output is for several runs"),
        ((*both, "--write-golden", fleet / "g"), "--write-golden takes one run directory"),
        ((fleet, "--write-golden", fleet / "g"), "--write-golden takes one run directory"),
        ((), "give one run directory or more"),
        ((fleet / "a", fleet / "b"), "a: no such file or directory, nor the others"),
    ):
        with pytest.raises(UsageError, match=message):
            report(*argv)


def test_rounds_in_a_fleet_are_runs_of_it(fleet: Path) -> None:
    soak = fleet / "node0000"
    moved = fleet / "kept"
    soak.rename(moved)
    soak.mkdir()
    moved.rename(soak / "round_001")
    report(fleet)
    assert named(fleet) == FOUND
    assert 'href="node0000/round_001/report.html"' in (fleet / "fleet.html").read_text()


def test_what_else_lies_there_is_left_out(fleet: Path) -> None:
    (fleet / "scripts").mkdir()
    (fleet / "scripts" / "burnin.sh").touch()
    (fleet / "latest").symlink_to(fleet / "node0001")
    (fleet / "broken").symlink_to("nowhere")
    _, said = report(fleet)
    assert named(fleet) == FOUND
    assert f"[launcher] {fleet}: 1 more in it hold no run: left out" in said
