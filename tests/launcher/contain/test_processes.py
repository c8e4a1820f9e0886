"""Whose process is whose, as process tables."""

from launcher.contain.processes import Family, Process, members

US, OUR_SESSION = 100, 90
GUARDIAN = 101
WORKER = 110  # leader of its own group and session
FAMILY = Family("tag", 1000, US, OUR_SESSION, frozenset({GUARDIAN, 102}))


def process(pid: int, ppid: int, session: int, **more: object) -> Process:
    row = {"state": "S", "group": session, "started_ticks": 2000} | more
    return Process(pid=pid, ppid=ppid, session=session, **row)  # type: ignore[arg-type]


SUPERVISOR = process(US, 1, OUR_SESSION, started_ticks=1000)
LEADER = process(WORKER, US, WORKER)


def found(*rows: Process, tagged: frozenset[int] = frozenset()) -> set[int]:
    table = [SUPERVISOR, *rows]
    return {p.pid for p in members(FAMILY, {WORKER}, table, lambda pid: pid in tagged)}


def test_a_group_is_ours_when_its_leader_is_dead() -> None:
    dead = LEADER._replace(state="Z")
    assert found(dead, process(120, 1, WORKER)) == {120}


def test_a_job_control_group_within_a_workers_session_is_ours() -> None:
    assert found(process(120, 1, WORKER, group=120)) == {120}


def test_an_escapee_that_came_back_to_us_is_ours_with_its_children() -> None:
    assert found(process(120, US, 120), process(121, 120, 121)) == {120, 121}


def test_an_escapee_below_a_living_worker_is_ours() -> None:
    assert found(LEADER, process(120, WORKER, 120)) == {WORKER, 120}


def test_a_tagged_escapee_is_ours_wherever_it_hangs() -> None:
    assert found(process(120, 1, 120), process(121, 1, 121), tagged=frozenset({121})) == {121}


def test_what_else_this_program_started_is_spared() -> None:
    in_our_session = process(130, US, OUR_SESSION)
    its_daemon = process(131, 130, 131)
    from_before = process(102, US, 102)
    its_child = process(132, 102, 132)
    guardian = process(GUARDIAN, US, GUARDIAN)
    assert found(in_our_session, its_daemon, from_before, its_child, guardian) == set()


def test_whoever_started_before_us_is_a_stranger() -> None:
    old = process(120, 1, 120, started_ticks=999)
    assert found(old, tagged=frozenset({120})) == set()


def test_a_table_read_while_pids_were_reused_ends() -> None:
    assert found(process(120, 121, 120), process(121, 120, 121)) == set()


def test_what_came_back_to_pid_1_may_be_a_strangers() -> None:
    family = FAMILY._replace(ancestor=1, ancestor_session=1)
    ours = [process(WORKER, 1, WORKER), process(120, WORKER, 120), process(121, 1, WORKER)]
    tagged, stranger = process(122, 1, 122), process(130, 1, 130)
    table = [process(1, 0, 1), *ours, tagged, stranger, process(131, 130, 130)]
    found = {p.pid for p in members(family, {WORKER}, table, lambda pid: pid == 122)}
    assert found == {WORKER, 120, 121, 122}
