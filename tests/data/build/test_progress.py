"""What is said while a text is tokenized."""

from model_check.data.build.progress import BuildProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_lines_come_and_grow_rarer() -> None:
    clock, said = Clock(), list[str]()
    progress = BuildProgress(100_000_000, None, said.append, clock=clock)
    for _ in range(100):
        clock.now += 1.0
        progress.advance(1_000_000, 300_000)
    assert 10 < len(said) < 30
    assert said[0].startswith("data: tokenizing, 2%, 2.0 of 100.0 MB, 300,000 tokens, 1.0 MB/s, ")
    assert said[0].endswith(" tokens/s, ETA 1:38")
    progress.finish()
    assert said[-1].startswith("data: tokenized, 100.0 MB, 300,000 tokens, 1.0 MB/s, ")


def test_the_end_reads_as_the_end_although_blank_documents_were_not_counted() -> None:
    said: list[str] = []
    progress = BuildProgress(100_000_000, 400_000, said.append, clock=Clock())
    progress.advance(97_000_000, 300_000)
    progress.finish()
    assert said[-1].startswith("data: tokenized, 100.0 MB, 300,000 tokens, ")


def test_a_text_that_was_not_read_to_its_end_says_how_far() -> None:
    said: list[str] = []
    progress = BuildProgress(100_000_000, 300_000, said.append, clock=Clock())
    progress.advance(20_000_000, 300_000)
    progress.finish()
    assert said[-1].startswith("data: tokenized, the first 20.0 of 100.0 MB, 300,000 tokens, ")


def test_on_a_terminal_a_bar_is_drawn_and_removed() -> None:
    clock, said, drawn = Clock(), list[str](), list[str]()
    progress = BuildProgress(10_000_000, None, said.append, drawn.append, clock=clock)
    clock.now += 1.0
    progress.advance(5_000_000, 1_000_000)
    assert drawn == [
        "data: [######------] 50% 5.0 MB, 5.0 MB/s, 1,000,000 tokens/s, ETA 0:01",
    ]
    assert said == []
    progress.finish()
    assert drawn[-1] == ""


def test_who_waits_is_told_the_same() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(10_000_000, None, lambda line: None, report=told.append, clock=clock)
    clock.now += 2.0
    progress.advance(5_000_000, 1_000_000)
    assert told == ["50%, 5.0 of 10.0 MB, 1,000,000 tokens, 2.5 MB/s, 500,000 tokens/s, ETA 0:02"]


def test_the_speed_is_that_of_this_process_alone() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(10_000_000, None, lambda line: None, report=told.append, clock=clock)
    progress.resume(5_000_000, 1_000_000)
    clock.now += 2.0
    progress.advance(2_500_000, 1_500_000)
    assert told == ["75%, 7.5 of 10.0 MB, 1,500,000 tokens, 1.2 MB/s, 250,000 tokens/s, ETA 0:02"]


def test_a_stream_of_unknown_length_is_measured_by_the_tokens_it_must_give() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(None, 4_000, lambda line: None, report=told.append, clock=clock)
    clock.now += 1.0
    progress.advance(1_000_000, 1_000)
    assert told == ["25%, 1.0 MB, 1,000 tokens, 1.0 MB/s, 1,000 tokens/s, ETA 0:03"]
