"""MIDI files as a source: pieces, broken files, tables that divide them; and notes as tokens."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from model_check.data.build.build import BuildOptions
from model_check.data.build.make import make
from model_check.data.build.request import cache_request
from model_check.data.cache.memo import Memo
from model_check.data.read.token_cache import TokenCache
from model_check.data.sources import midi
from model_check.data.sources.documents import TokenIds
from model_check.data.sources.midi import NOTE, Notes, names_of, notes_of, read_notes, write_notes
from model_check.data.sources.midi_files import MidiSource
from model_check.data.sources.text import Repairs
from model_check.errors import ConfigError, DataError
from tests.data.lab import WORDS, Lab, settings_for

needs_music = pytest.mark.midi
NO_BPE = ("data.tokenizer=auto",)


def on_the_grid(rng: np.random.Generator) -> Notes:
    """A piece that tokens can say, in their order."""
    names = midi.vocabulary()
    velocities = [int(name.split("_")[1]) for name in names if name.startswith("Velocity")]
    lengths = [midi._ticks(name.split("_")[1]) for name in names if name.startswith("Duration")]
    size = int(rng.integers(1, 60))
    notes = np.empty(size, NOTE)
    notes["start"] = np.cumsum(rng.choice([0, 0, 1, 3, 8, 20, 100, 333], size))
    notes["duration"], notes["velocity"] = rng.choice(lengths, size), rng.choice(velocities, size)
    notes["pitch"] = rng.integers(21, 109, size)
    # A key is struck once at a time.
    _, once = np.unique(notes[["start", "pitch"]], return_index=True)
    return notes[once]


def piece(*pitches: int, velocity: int = 79) -> Notes:
    """A note a beat."""
    rows = [(8 * number, 4, pitch, velocity) for number, pitch in enumerate(pitches)]
    return np.array(rows, NOTE)


def folder(lab: Lab, **pieces: Sequence[int]) -> Path:
    """A .mid file a piece."""
    for name, pitches in pieces.items():
        path = lab.dir / "music" / f"{name}.mid"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_notes(path, piece(*pitches))
    return lab.dir / "music"


def pieces_in(path: Path) -> tuple[list[list[int]], list[str]]:
    """(the pitches of each piece, repairs as they are reported)"""
    repairs, names = Repairs(), midi.vocabulary()
    documents = list(MidiSource(path, Memo(path.parent / "memo")).documents(repairs))
    assert all(isinstance(document, TokenIds) for document in documents)
    notes = [notes_of([names[i] for i in document.ids])[0] for document in documents]
    return [each["pitch"].tolist() for each in notes], repairs.lines()


def stored(lab: Lab, split: str, path: Path) -> list[str]:
    """The names of the tokens of a split's sequences, without padding."""
    rows = TokenCache.open(path).split(split)
    ids = rows.gather(np.arange(rows.num_sequences)).ravel()
    names = [*midi.vocabulary(), "end"]
    return [names[i] for i in ids if i >= 0]


@needs_music
def test_notes_to_tokens_to_notes_of_a_thousand_pieces() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        notes = on_the_grid(rng)
        back, num_lost = notes_of(names_of(notes))
        assert num_lost == 0
        assert np.array_equal(np.sort(back, order=["start", "pitch"]), notes)


@needs_music
def test_notes_come_back_from_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        notes = on_the_grid(rng)
        # In a file a key that is struck again while it is held cannot be told apart.
        notes["duration"] = 1
        write_notes(tmp_path / "x.mid", notes)
        back = np.sort(read_notes(tmp_path / "x.mid"), order=["start", "pitch"])
        assert np.array_equal(back, notes)


def test_what_is_no_note_is_left_out_and_counted() -> None:
    note = ["Pitch_60", "Velocity_79", "Duration_1.0.8"]
    odd = ["GENAI", "Pitch_61", "Velocity_79", *note, "TimeShift_0.4.8", "Velocity_3", *note[:1]]
    notes, num_lost = notes_of([*odd, *note])
    assert notes.tolist() == [(0, 8, 60, 79), (4, 8, 60, 79)]
    assert num_lost == 5


def test_without_the_packages_the_message_says_how_to_get_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("symusic", "miditok"):
        monkeypatch.setitem(sys.modules, name, None)
    lab.text(b"MThd", "music/a.mid")
    with pytest.raises(DataError, match=r"pip install 'symusic>=0.6' 'miditok>=3.1'"):
        lab.prepare(lab.dir / "music", *NO_BPE)


@needs_music
def test_files_are_pieces_in_order_and_hidden_ones_are_not_read(lab: Lab) -> None:
    place = folder(lab, b=[62], a=[60, 61], **{"sub/c": [63], ".hidden": [70]})
    (place / "a.mid").rename(place / "z.MIDI")
    (place / "b.mid").rename(place / "a.mid")
    assert pieces_in(place) == ([[62], [63], [60, 61]], [])


@needs_music
def test_a_file_alone_is_music_too(lab: Lab) -> None:
    prepared = lab.prepare(folder(lab, a=range(40, 80)) / "a.mid", *NO_BPE)
    assert prepared.view.vocab_size == len(midi.vocabulary()) + 1
    assert stored(lab, "train", prepared.path)[:3] == ["Pitch_40", "Velocity_79", "Duration_0.4.8"]


@needs_music
def test_broken_files_are_counted_and_named(lab: Lab) -> None:
    place = folder(lab, good=[60, 61], long=[60])
    whole = (place / "good.mid").read_bytes()
    (place / "cut.mid").write_bytes(whole[:-9])
    (place / "empty.mid").write_bytes(b"")
    (place / "text.mid").write_text("no music at all, and longer than a header")
    write_notes(place / "silent.mid", np.empty(0, NOTE))
    late = piece(60)
    late["start"] = 30_000_000
    write_notes(place / "long.mid", late)
    pieces, repairs = pieces_in(place)
    assert pieces == [[60, 61]]
    assert [line.partition(" (first at ")[0] for line in repairs] == [
        "3 x file skipped: not readable as MIDI",
        "1 x file skipped: it is longer than 131,072 beats",
        "1 x file skipped: it has no notes for a piano",
    ]
    assert "(first at cut.mid: not readable as MIDI: " in repairs[0]


@needs_music
def test_no_bytes_make_a_traceback(lab: Lab) -> None:
    whole = (folder(lab, a=range(30, 90)) / "a.mid").read_bytes()
    draw = random.Random(0)
    for number in range(300):
        content = bytearray(whole[: draw.randrange(len(whole))] if number % 3 == 0 else whole)
        for _ in range(draw.randrange(6)):
            if content:
                content[draw.randrange(min(len(content), 40 if number % 2 else 999))] = (
                    draw.randrange(256)
                )
        lab.text(bytes(content), f"fuzz/{number:03}.mid")
    pieces, repairs = pieces_in(lab.dir / "fuzz")
    skipped = sum(int(line.split(" x file")[0]) for line in repairs if "file skipped" in line)
    assert len(pieces) + skipped == 300
    assert 0 < len(pieces) < 300


@needs_music
def test_a_folder_of_broken_files_is_an_error_that_says_why(lab: Lab) -> None:
    lab.text(b"nothing", "music/a.mid")
    with pytest.raises(DataError, match=r"no usable text: 1 x file skipped: not readable as MIDI"):
        lab.prepare(lab.dir / "music", *NO_BPE)


@needs_music
def test_drums_and_what_no_piano_has_is_left_out_and_said(lab: Lab) -> None:
    import symusic

    score = symusic.Score(480)
    for is_drum, pitch in ((False, 60), (False, 120), (True, 40), (False, 62)):
        track = symusic.Track(is_drum=is_drum, program=40)
        track.notes.append(symusic.Note(0, 480, pitch, 80))
        score.tracks.append(track)
    (lab.dir / "music").mkdir()
    score.dump_midi(lab.dir / "music" / "a.mid")
    pieces, (line,) = pieces_in(lab.dir / "music")
    assert pieces == [[60, 62]]
    assert line == (
        "1 x piece without its notes of drums and beyond the piano's keys (first at a.mid)"
    )


@needs_music
def test_a_cache_is_found_again_and_a_changed_file_makes_a_new_one(lab: Lab) -> None:
    place = folder(lab, a=range(40, 80))
    first = lab.prepare(place, *NO_BPE)
    assert lab.prepare(place, "data.tokenizer=midi").path == first.path
    assert lab.prepare(place, *NO_BPE).hit
    folder(lab, a=range(41, 80))
    assert lab.prepare(place, *NO_BPE).path != first.path


@needs_music
def test_processes_give_the_same_bytes(lab: Lab) -> None:
    place = folder(lab, **{f"p{n}": range(30 + n, 60 + n) for n in range(12)})
    (place / "broken.mid").write_bytes(b"no")
    contents = []
    for num_workers in (1, 2):
        cache = lab.dir / f"cache{num_workers}"
        request = cache_request(settings_for(cache, place, *NO_BPE), lab.said.append)
        options = BuildOptions(num_workers=num_workers, task_bytes=1, tasks_a_worker=1)
        make(request, "full", lab.said.append, options)
        contents.append({path.name: path.read_bytes() for path in request.store.iterdir()})
    assert contents[0] == contents[1]


@needs_music
def test_a_column_of_the_table_divides_the_pieces(lab: Lab) -> None:
    place = folder(lab, **{"x/a": range(40, 60), "x/b": range(60, 80), "c": range(80, 100)})
    table = "title,composer,midi_filename\nA,Bach,x/a.mid\nB,Chopin,x/b.mid\nD,Bach,gone.mid\n"
    lab.text(table, "music/pieces.csv")
    splits = "data.validation=bach=composer:Bach,chopin=composer:Chopin"
    prepared = lab.prepare(place, *NO_BPE, splits)
    pitches = {
        name: {word for word in stored(lab, name, prepared.path) if word.startswith("Pitch")}
        for name in ("train", "bach", "chopin")
    }
    assert pitches["bach"] == {f"Pitch_{n}" for n in range(40, 60)}
    assert pitches["chopin"] == {f"Pitch_{n}" for n in range(60, 80)}
    assert "Pitch_80" in pitches["train"]
    assert not pitches["train"] & (pitches["bach"] | pitches["chopin"])


@needs_music
@pytest.mark.parametrize(
    ("table", "what", "message"),
    [
        (None, "composer:Bach", "needs a table of them: metadata.csv, or one .csv"),
        ("file,year\na.mid,1", "composer:Bach", r"no column 'composer' \(there are file, year\)"),
        ("file,composer\na.mid,Bach", "composer:Liszt", r"no MIDI file has it .*there are: Bach"),
        ("file,composer\nz.mid,Bach", "composer:Bach", "no column has the paths of MIDI files"),
        ("file,composer\na.mid,Bach", "composer:Bach", "all its MIDI files are for validation"),
        (b"\xff\xfe\x00", "composer:Bach", "cannot be read as a table"),
    ],
)
def test_a_table_that_does_not_tell_is_one_clear_error(
    lab: Lab, table: str | bytes | None, what: str, message: str
) -> None:
    place = folder(lab, a=range(40, 60))
    if table is not None:
        lab.text(table, "music/metadata.csv")
    with pytest.raises(DataError, match=message):
        lab.prepare(place, *NO_BPE, f"data.validation=one={what}")


@needs_music
def test_several_tables_are_refused_unless_one_has_the_usual_name(lab: Lab) -> None:
    place = folder(lab, a=range(40, 60), b=range(60, 80))
    for name in ("one", "two"):
        lab.text("file,composer\na.mid,Bach", f"music/{name}.csv")
    with pytest.raises(DataError, match=r"several tables \(one.csv, two.csv\)"):
        lab.prepare(place, *NO_BPE, "data.validation=bach=composer:Bach")
    (place / "one.csv").rename(place / "metadata.csv")
    lab.prepare(place, *NO_BPE, "data.validation=bach=composer:Bach")


@needs_music
def test_a_folder_may_validate_another(lab: Lab) -> None:
    place = folder(lab, **{"train/a": range(40, 60), "held/b": range(60, 80)})
    held = place / "held"
    prepared = lab.prepare(place, *NO_BPE, f"data.validation=held={held}")
    assert "Pitch_70" not in stored(lab, "train", prepared.path)
    assert "Pitch_70" in stored(lab, "held", prepared.path)


@needs_music
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.tokenizer=bpe", "data.tokenizer=midi alone reads"),
        ("training.stage=prompt_target", "a piece has no prompt and target"),
    ],
)
def test_pieces_are_refused_where_nothing_reads_them(lab: Lab, override: str, message: str) -> None:
    tokenizer = "data.tokenizer=bpe" if "bpe" in override else "data.tokenizer=midi"
    with pytest.raises(ConfigError, match=message):
        lab.prepare(folder(lab, a=range(40, 60)), tokenizer, override)


@needs_music
def test_beside_text_a_folder_is_music_only_where_that_is_asked_for(lab: Lab) -> None:
    place = folder(lab, a=range(40, 60))
    lab.text(WORDS * 20, "music/README.md")
    with pytest.raises(ConfigError, match=r"MIDI, which data\.tokenizer=midi alone reads"):
        lab.prepare(place)
    lab.text(WORDS * 20, "music/readme.txt")
    assert lab.prepare(place).view.vocab_size == 300
    assert lab.prepare(place, "data.tokenizer=midi").view.vocab_size != 300


@needs_music
def test_examples_in_names_are_prepared_and_a_word_that_is_no_token_is_counted(lab: Lab) -> None:
    target = "Pitch_60 Velocity_79 Duration_0.4.8"
    rows = [
        {"prompt": "TASK_LOUD Pitch_60 GENAI", "completion": target},
        {"prompt": "TASK_LOUD loud GENAI", "completion": target},
        {"prompt": "TASK_LOUD GENAI", "completion": f"{target} <|endoftext|>"},
    ]
    tasks = lab.text("\n".join(map(json.dumps, rows)), "tasks.jsonl")
    prepared = lab.prepare(tasks, "data.tokenizer=midi", "training.stage=prompt_target")
    assert prepared.view.num_sequences == 1
    assert any(
        "2 x document skipped: it has a word that is no token (first at tasks.jsonl:2: 'loud')"
        in line
        for line in lab.said
    )


@needs_music
def test_the_tokenizer_of_music_is_an_ordinary_file(lab: Lab) -> None:
    """So a store's tokenizer.json, a checkpoint's or an export's can be named, too."""
    prepared = lab.prepare(folder(lab, a=range(40, 60)), *NO_BPE)
    (store,) = lab.stores()
    tasks = lab.text(json.dumps({"text": "Pitch_60 Velocity_79 Duration_0.4.8 " * 20}), "t.jsonl")
    again = lab.prepare(tasks, f"data.tokenizer={store / 'tokenizer.json'}")
    assert again.view.vocab_size == prepared.view.vocab_size
    assert stored(lab, "train", again.path)[:2] == ["Pitch_60", "Velocity_79"]
