"""Output gathers while there is much of it, and no pipe fills up meanwhile."""

from launcher.supervise.pace import MAX_REST_S, Pace

PIPE_BYTES = 1 << 16


def test_a_line_now_and_then_is_read_as_it_comes() -> None:
    pace = Pace()
    for second in range(100):
        pace.took(70)
        assert pace.rest_s(now=float(second)) == 0


def test_the_first_lines_of_many_workers_wait_for_nothing() -> None:
    pace = Pace()
    for worker in range(8):
        pace.took(70)
        assert pace.rest_s(now=worker / 1000) == 0


def test_many_small_reads_gather() -> None:
    pace = Pace()
    rests = []
    for turn in range(100):
        pace.took(70)
        rests.append(pace.rest_s(now=turn / 1000))
    assert rests[0] == 0
    assert rests[-1] == MAX_REST_S


def test_a_pipe_that_is_full_is_emptied_at_once() -> None:
    pace, now, rest_s = Pace(), 0.0, MAX_REST_S
    for _ in range(64):
        pace.took(70)
    pace.rest_s(now)
    for _ in range(6):  # it writes 64 KiB however short the rest was
        now += rest_s
        pace.took(PIPE_BYTES)
        rest_s = pace.rest_s(now)
    assert rest_s == 0


def test_a_steady_stream_fills_no_more_than_half_a_pipe() -> None:
    bytes_per_s = 1e6
    pace, now, rest_s = Pace(), 0.0, 0.001
    for _ in range(200):
        gathered = bytes_per_s * rest_s
        assert gathered < PIPE_BYTES / 2
        now += rest_s
        pace.took(int(gathered))
        rest_s = pace.rest_s(now) or 0.001


def test_a_turn_without_output_says_nothing_of_a_rest() -> None:
    assert Pace().rest_s(now=1.0) == 0
