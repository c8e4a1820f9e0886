"""A checkpoint of ranks that share a model: what is written, what is noticed, what goes on from it.
Here one process writes it, in a group of one; tests/engine/test_shards.py has several."""

import errno
import fcntl
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from model_check.data.sources.chat import template_of
from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.saving.checkpoint_files import sweep_leftovers, unfinished
from model_check.engine.saving.earlier import (
    keep_file,
    keeping_shards,
    move_closed,
    remove_checkpoint,
)
from model_check.engine.saving.lineage import newest_first
from model_check.engine.sharded.manifest import read_manifest
from model_check.engine.sharded.parts import part_of
from model_check.engine.sharded.shards import own_sums
from model_check.engine.sharded.sums import Part, sums_of
from model_check.engine.sharded.together import Together
from model_check.engine.sharded.writing import write_shards
from model_check.engine.state import Resumable
from model_check.errors import CheckpointError, ConfigError, DataError, StorageError
from model_check.forensics.fingerprint import Fingerprint, eager_fingerprint, fingerprint_for
from model_check.generate.text_model import read_text_model
from model_check.library import load_model
from model_check.utils.checkpoint_names import MANIFEST, common_file, is_sharded
from model_check.utils.held import HeldDirectory, hold
from tests.engine.conftest import Run

MakeRun = Callable[..., Run]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone() -> Iterator[Together]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Together.new(0, 1, timeout_s=60)
    dist.destroy_process_group()


@pytest.fixture
def save(alone: Together) -> Callable[[Run, Path], Path]:
    def write(run: Run, path: Path) -> Path:
        """What the run has now, as ranks that share it would save it."""
        state = run.trainer.state
        num_done = int(state.optimizer.num_steps)
        captured = state.capture(num_done, 0.0)
        common = captured | {"model": {}, "kept": []}
        common["optimizer"] |= {"state": {}, "step": state.optimizer.num_steps}
        tensors = state.weights_and_moments()
        sums = own_sums(tensors, fingerprint_for(CPU))
        write_shards(path, common, tensors, sums, alone)
        return path

    return write


@pytest.fixture
def saved(
    tiny_run: MakeRun, save: Callable[[Run, Path], Path], tmp_path: Path
) -> Callable[[int], Path]:
    def at(num_steps: int) -> Path:
        run = tiny_run(training__max_steps=num_steps)()
        run.trainer.state.progress.run_id = "one run"
        return save(run, tmp_path / "checkpoints" / f"step_{num_steps}")

    return at


def shard_of(path: Path) -> Path:
    (shard,) = path.glob("*/*.safetensors")
    return shard


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_another_process_goes_on_to_the_bits_of_a_run_that_was_not_interrupted(
    tiny_run: MakeRun, saved: Callable[[int], Path]
) -> None:
    whole = tiny_run(training__max_steps=5)()
    path = saved(2)
    rest = tiny_run(training__max_steps=5, training__resume="auto")()
    assert rest.trainer.state.progress.resumed == path
    assert rest.bits() == whole.bits()[2:]
    ours, theirs = whole.weights(), rest.weights()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_it_can_be_read_as_a_file_can(tiny_run: MakeRun, saved: Callable[[int], Path]) -> None:
    run = tiny_run(training__max_steps=2, training__save_last="true")()
    path = saved(2)
    whole = read_checkpoint(path.with_name("last.pt"), Resumable)
    state = read_checkpoint(path, Resumable)
    assert state["step"] == 2
    assert state["settings"]["model"] == whole["settings"]["model"]
    for name, weight in whole["model"].items():
        assert torch.equal(state["model"][name], weight)
    for number, moments in whole["optimizer"]["state"].items():
        assert all(
            torch.equal(state["optimizer"]["state"][number][n], m) for n, m in moments.items()
        )
    model = load_model(path)
    assert all(torch.equal(p.detach(), run.weights()[n]) for n, p in model.named_parameters())
    initial = tiny_run(model__init_from=str(path))
    assert torch.equal(initial.weights()["norm.weight"], run.weights()["norm.weight"])


def damages(path: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """What may befall it -> how, and what is said of it."""
    shard, manifest = shard_of(path), path / MANIFEST
    content = json.loads(manifest.read_text())

    def forge(**changes: Any) -> None:
        manifest.write_text(json.dumps(content | changes))

    def plant(file: Path) -> None:
        file.write_bytes(pickle.dumps(_Bomb()))

    return {
        "flipped": (
            lambda: flip(shard, shard.stat().st_size - 6),
            r"step_2: shard-00001-\S+: damaged: \S+: bit \d+ of value [\d,]+ differs",
        ),
        "header": (lambda: flip(shard, 9), r"shard-00001-\S+: "),
        "cut": (lambda: os.truncate(shard, 999), r"shard-00001-\S+: cut off: 999 of [\d,]+ bytes"),
        "missing": (shard.unlink, r"shard-00001-\S+: missing"),
        "stranger": (
            lambda: shutil.copy(
                shard, shard.with_name("shard-00002-model-00001-of-00001.safetensors")
            ),
            r"shard-00002-\S+: is not of this checkpoint",
        ),
        "common": (lambda: flip(shard.with_name("common.pt"), 700), r"common\.pt: does not match"),
        "manifest": (lambda: os.truncate(manifest, 99), r"manifest\.json: damaged"),
        "elsewhere": (lambda: forge(directory="../../x"), r"manifest\.json: damaged"),
        "greedy": (
            lambda: forge(tensors={"weights/a": _entry([1 << 40], shard.name)}),
            r"manifest\.json: damaged: \S+ cannot hold",
        ),
        "gap": (
            lambda: forge(tensors={"weights/a": _entry([9], shard.name) | {"chunks": []}}),
            r"do not make a whole",
        ),
        "pickle": (lambda: plant(shard), r"shard-00001-\S+: cut off"),
        "not text": (
            lambda: manifest.write_bytes(
                manifest.read_bytes().replace(b"float32", b"flo\xff32", 1)
            ),
            r"manifest\.json: damaged",
        ),
        "endless lists": (
            lambda: manifest.write_bytes(b'{"lists":' + b"[" * 100_000),
            r"manifest\.json: damaged",
        ),
        "a line of another": (
            lambda: forge(tensors={"weights/a\n[launcher] PASS": _entry([9], shard.name)}),
            r"\A.*manifest\.json: damaged: .*\Z",
        ),
    }


def _entry(shape: list[int], file: str) -> dict[str, Any]:
    chunk = {"file": file, "offsets": [0] * len(shape), "sizes": shape, "sum": "0" * 16}
    return {"shape": shape, "dtype": "float32", "chunks": [chunk]}


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_damage_is_named_and_the_save_before_it_taken(
    tiny_run: MakeRun, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    _, path = saved(1), saved(2)
    sound = tmp_path / "sound"
    shutil.copytree(path, sound)
    for kind in damages(path):
        shutil.rmtree(path)
        shutil.copytree(sound, path)
        do, said = damages(path)[kind]
        do()
        with pytest.raises(CheckpointError, match=said):
            read_checkpoint(path)
        if kind not in ("flipped", "missing", "manifest"):
            continue
        run = tiny_run(training__max_steps=3, training__resume="auto")
        told = [line for line in run.kept.lines if line.startswith("Not resumed: ")]
        assert len(told) == 1, kind
        assert run.trainer.state.progress.step == 1, kind
        assert not Path("exploded").exists()
    with pytest.raises(CheckpointError, match=r"`--resume .* takes the newest"):
        tiny_run(training__resume=str(path))


_FAR = 1 << 40

FORGED: dict[str, tuple[list[int], list[tuple[int, ...]]]] = {
    "further than a process can count": ([_FAR * _FAR, 0], []),
    "no value": ([0], []),
    "no dimension": ([], [(0, 1)]),
    "behind the end": ([8, 2], [(_FAR, 8)]),
    "partly behind the end": ([8, 2], [(1, 8)]),
    "twice, and a gap": ([8, 2], [(0, 4), (0, 4)]),
    "a gap, and over the end": ([8, 2], [(0, 4), (5, 4)]),
    "none, at a place that is not there": ([8, 2], [(0, 8), (_FAR, 0)]),
}
"""A shape, and (first row, number of rows) of its chunks."""


@pytest.mark.parametrize("what", FORGED)
def test_chunks_that_make_no_whole_are_damage_before_a_file_is_read(
    tmp_path: Path, what: str
) -> None:
    """To look for the flipped bit of a value behind the end took for ever."""
    (shape, rows), file = FORGED[what], "shard-00001-model-00001-of-00001.safetensors"
    chunks = [
        {"file": file, "offsets": at, "sizes": size, "sum": "0" * 16}
        for first, number in rows
        for at, size in [
            ([first, *(0 for _ in shape[1:])], [number, *shape[1:]]) if shape else ([], [])
        ]
    ]
    forged = {
        "schema": 1,
        "step": 2,
        "world": {"ranks": 1},
        "directory": "0" * 16,
        "files": {name: {"size": 1 << 20, "sha256": ""} for name in ("common.pt", file)},
        "tensors": {"weights/a": {"shape": shape, "dtype": "float32", "chunks": chunks}},
    }
    (tmp_path / MANIFEST).write_text(json.dumps(forged))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged: "):
        read_manifest(tmp_path)


Header = dict[str, Any]


def _moves(header: Header) -> None:
    _told(header, "0", "1")


def _nests(header: Header) -> None:
    header["__metadata__"]["DCP_SHARDING_INFO"] = "[" * 100_000


def _says_nothing(header: Header) -> None:
    del header["__metadata__"]


def _places_none(header: Header) -> None:
    _told(header, "saved_offsets", "offsets")


def _places_by_words(header: Header) -> None:
    _told(header, "[0", '["here"')


def _adds_one(header: Header) -> None:
    end = max(entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__")
    header["a"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


def _told(header: Header, old: str, new: str) -> None:
    own = header["__metadata__"]
    own["DCP_SHARDING_INFO"] = own["DCP_SHARDING_INFO"].replace(old, new)


@pytest.mark.parametrize(
    "forge", [_moves, _nests, _says_nothing, _places_none, _places_by_words, _adds_one]
)
def test_a_forged_header_of_a_shard_is_damage_and_the_save_before_is_taken(
    tiny_run: MakeRun,
    saved: Callable[[int], Path],
    capfd: pytest.CaptureFixture[str],
    forge: Callable[[Header], None],
) -> None:
    """The checksums match: only what reads the header could notice."""
    before, path = saved(1), saved(2)
    shard, manifest = shard_of(path), path / MANIFEST
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    forge(header)
    forged = json.dumps(header).encode()
    shard.write_bytes(len(forged).to_bytes(8, "little") + forged + content[end:])
    told = json.loads(manifest.read_bytes())
    own = {"size": shard.stat().st_size, "sha256": sha256(shard.read_bytes()).hexdigest()}
    told["files"][shard.name] = own
    manifest.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=rf"{shard.name}: damaged: "):
        read_checkpoint(path, Resumable)
    run = tiny_run(training__max_steps=3, training__resume="auto")()
    assert run.trainer.state.progress.resumed == before
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_directory_that_no_save_began_is_not_called_unfinished(
    saved: Callable[[int], Path],
) -> None:
    path = saved(1)
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it has no manifest\.json"):
        read_checkpoint(path.parent)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="not a checkpoint: its save was not finished"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000], ids=["not text", "endless lists"])
def test_where_a_tokenizer_is_looked_for_in_a_damaged_checkpoint_that_is_told(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / MANIFEST).write_bytes(b'{"directory":' + content)
    with pytest.raises(ValueError, match=r"manifest\.json: "):
        common_file(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"bos_token":' + content)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not the configuration"):
        template_of(tmp_path)


@pytest.mark.root
def test_a_directory_that_may_not_be_entered_is_told_and_never_passed_over(
    saved: Callable[[int], Path],
) -> None:
    """It was taken for no checkpoint: --resume auto went on from an older one without a word, and a
    run that had trained ended for want of the name."""
    with tempfile.TemporaryDirectory() as public:
        place, closed = Path(public), Path(public, "last")
        place.chmod(0o777)
        shutil.copytree(saved(2), closed)
        closed.chmod(0o700)
        (place / "last.earlier").mkdir(mode=0o700)
        os.seteuid(4711)
        try:
            assert newest_first(place) == [closed]
            for read in (read_checkpoint, lambda path: read_text_model(path, CPU, None)):
                with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: Perm"):
                    read(closed)
            for below in (closed / "last", closed / "last.pt"):
                with pytest.raises((CheckpointError, ConfigError), match="cannot be read: Perm"):
                    read_checkpoint(below)
                with pytest.raises((CheckpointError, ConfigError), match="last"):
                    read_text_model(below, CPU, None)
            with pytest.raises(OSError, match=r"not permitted|denied"):
                remove_checkpoint(closed)
            assert move_closed(closed) == place / "last.earlier2"
        finally:
            os.seteuid(0)
        read_checkpoint(place / "last.earlier2")


def test_each_rank_looks_at_the_file_that_all_of_them_read(
    saved: Callable[[int], Path],
) -> None:
    """A rank that waits for a pipe keeps the others waiting, which have seen what it is."""
    path = saved(1)
    common = shard_of(path).with_name("common.pt")
    content = common.read_bytes()
    flipped = content[:700] + bytes([content[700] ^ 4]) + content[701:]
    for befall, said in (
        (lambda: os.mkfifo(common), r"common\.pt: cannot be read: is no plain file"),
        (lambda: common.write_bytes(flipped), r"common\.pt: does not match its checksum"),
        (lambda: None, r"common\.pt: missing"),
    ):
        common.unlink(missing_ok=True)
        befall()
        told = set()
        for rank in range(3):
            with pytest.raises(CheckpointError, match=said) as caught:
                read_checkpoint(path, Resumable, hollow=True, share=(rank, 3))
            told.add(str(caught.value))
        assert len(told) == 1  # so that a job says it once


def test_a_shard_of_another_save_is_no_shard_of_this_one(saved: Callable[[int], Path]) -> None:
    earlier, path = saved(1), saved(2)
    assert shard_of(earlier).stat().st_size == shard_of(path).stat().st_size
    shutil.copy(shard_of(earlier), shard_of(path))
    with pytest.raises(
        CheckpointError, match=r"shard-00001-\S+: damaged: weights/tok_embed\.weight"
    ):
        read_checkpoint(path)


def test_what_only_its_author_could_load_is_not_loaded(
    saved: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write there can make every checksum anew, and still runs no code here."""
    monkeypatch.chdir(tmp_path)
    path = saved(2)
    common = shard_of(path).with_name("common.pt")
    torch.save({"schema": 2, "optimizer": {}, "x": _Bomb()}, common)
    import hashlib

    content = json.loads((path / MANIFEST).read_text())
    digest = hashlib.sha256(common.read_bytes()).hexdigest()
    content["files"]["common.pt"] = {"size": common.stat().st_size, "sha256": digest}
    (path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        read_checkpoint(path)
    assert not Path("exploded").exists()


def test_a_weight_that_is_not_finite_is_damage(
    tiny_run: MakeRun, save: Callable[[Run, Path], Path], tmp_path: Path
) -> None:
    run = tiny_run(training__max_steps=1)()
    with torch.no_grad():
        run.trainer.state.model.get_parameter("norm.weight")[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"weights/norm\.weight: not finite"):
        read_checkpoint(save(run, tmp_path / "step_1"))


def test_the_second_save_of_a_name_replaces_the_first_and_leaves_nothing(
    tiny_run: MakeRun, save: Callable[[Run, Path], Path], tmp_path: Path
) -> None:
    path = tmp_path / "last"
    save(tiny_run(training__max_steps=1)(), path)
    (path / "notes.txt").write_text("mine")
    (first,) = (entry.name for entry in path.iterdir() if entry.is_dir())
    save(tiny_run(training__max_steps=2)(), path)
    names = {entry.name for entry in path.iterdir()}
    assert len(names) == 3
    assert first not in names
    assert read_checkpoint(path)["step"] == 2
    remove_checkpoint(path)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_what_an_earlier_run_left_under_the_name_is_kept_once(saved: Callable[[int], Path]) -> None:
    path = saved(1)
    earlier = path.with_name("step_1.earlier")
    for _ in range(2):  # the second replaces the first
        assert replaced(path) == earlier
        assert read_checkpoint(earlier)["step"] == 1
        saved(1)
    (path / MANIFEST).unlink()
    assert replaced(path) is None, "it was cut short"
    assert read_checkpoint(earlier)["step"] == 1


def replaced(path: Path) -> Path | None:
    """Keep what is in `path` while a new save takes its place."""
    with keeping_shards(path, "f" * 16) as earlier:
        (path / MANIFEST).unlink(missing_ok=True)
    return earlier


BEFORE, BETWEEN, AFTER = "before the old manifest is copied", "before the new one", "after it"


@pytest.mark.parametrize("name", ["last", "best", "step_4"])
@pytest.mark.parametrize("at", [BEFORE, BETWEEN, AFTER])
def test_a_kill_while_an_earlier_save_moves_away_loses_neither(
    saved: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, at: str, name: str
) -> None:
    new, path = saved(2), saved(1)
    path = path.rename(path.with_name(name))
    (attempt,) = (each for each in new.iterdir() if each.is_dir())
    shutil.copytree(attempt, path / attempt.name)
    if (child := os.fork()) == 0:
        rename = HeldDirectory.rename

        def kill(held: HeldDirectory, name: str, to: HeldDirectory, new: str) -> None:
            if name == new or at == BEFORE:  # the files move; or the copy takes its name
                os._exit(9)
            rename(held, name, to, new)

        monkeypatch.setattr(HeldDirectory, "rename", kill)
        with keeping_shards(path, attempt.name):
            if at == BETWEEN:
                os._exit(9)
            os.replace(new / MANIFEST, path / MANIFEST)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    is_new = at == AFTER
    assert read_checkpoint(path)["step"] == 1 + is_new
    earlier = path.with_name(f"{name}.earlier")
    assert not is_sharded(earlier), "its files are still where they were"
    sweep_leftovers(path.parent)
    assert read_checkpoint(path)["step"] == 1 + is_new
    assert earlier.exists() is is_new
    assert not is_new or read_checkpoint(earlier)["step"] == 1


def test_an_earlier_save_has_moved_though_the_disk_does_not_sync_it(
    saved: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new, path = saved(2), saved(1)
    (attempt,) = (each for each in new.iterdir() if each.is_dir())
    shutil.copytree(attempt, path / attempt.name)

    def fail(_: HeldDirectory) -> None:
        raise OSError(errno.EIO, "sync")

    with suppress(OSError), keeping_shards(path, attempt.name):
        os.replace(new / MANIFEST, path / MANIFEST)
        monkeypatch.setattr(HeldDirectory, "sync", fail)
    steps = [read_checkpoint(each)["step"] for each in (path, path.with_name("step_1.earlier"))]
    assert steps == [2, 1]


@pytest.mark.parametrize("at", ["replace", "the manifest"])
def test_an_earlier_save_stays_where_its_successor_cannot_be_written(
    saved: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    path = saved(1)
    if at == "replace":
        monkeypatch.setattr(HeldDirectory, "replace", fail)
    with pytest.raises(OSError, match="full"), keeping_shards(path, "f" * 16):
        fail()
    assert read_checkpoint(path)["step"] == 1
    assert not path.with_name("step_1.earlier").exists()


def test_an_error_behind_the_new_manifest_takes_neither_save_away(
    saved: Callable[[int], Path],
) -> None:
    """The disk failed to sync the directory: the new files went, and the manifest named them."""
    new, path = saved(2), saved(1)
    (attempt,) = (each for each in new.iterdir() if each.is_dir())
    shutil.copytree(attempt, path / attempt.name)
    with suppress(OSError), keeping_shards(path, attempt.name):
        os.replace(new / MANIFEST, path / MANIFEST)
        raise OSError(errno.EIO, "sync")
    assert read_checkpoint(path)["step"] == 2
    assert read_checkpoint(path.with_name("step_1.earlier"))["step"] == 1


def test_what_is_in_the_way_of_an_earlier_checkpoint_stays_and_so_does_that(
    saved: Callable[[int], Path],
) -> None:
    """A note in an older one, a file of that name: neither ends a run that has trained, nor is the
    earlier checkpoint overwritten."""
    path = saved(1)
    copy, older = path.with_name("copy"), path.with_name("step_1.earlier")
    second, third = path.with_name("step_1.earlier2"), path.with_name("step_1.earlier3")
    shutil.copytree(path, copy)
    older.mkdir()
    (older / "note").write_text("mine")
    for wanted in (second, second, third):  # the second is ours, and gives way
        if wanted == third:
            shutil.rmtree(second)
            second.write_text("mine, too")
        assert replaced(path) == wanted
        read_checkpoint(wanted)
        shutil.copytree(copy, path, dirs_exist_ok=True)
    assert (older / "note").read_text() + second.read_text() == "minemine, too"
    file = path.with_name("last.pt")
    file.write_text("a file")
    path.with_name("last.earlier.pt").mkdir()
    assert keep_file(file) == path.with_name("last.earlier2.pt")


def test_a_save_that_was_cut_short_never_counts_and_is_cleared_away(
    tiny_run: MakeRun, saved: Callable[[int], Path]
) -> None:
    path = saved(2)
    directory = path.parent
    cut = directory / "step_3"
    shutil.copytree(path, cut)
    (cut / MANIFEST).unlink()
    mine = directory / "step_4" / "mine"
    mine.mkdir(parents=True)
    assert newest_first(directory) == [path]
    assert unfinished(directory) == [cut]
    run = tiny_run(training__max_steps=3, training__resume="auto")
    assert f"Not resumed: {cut}: its save was not finished" in run.kept.lines
    assert run.trainer.state.progress.step == 2
    with pytest.raises(CheckpointError, match=r"step_3: its save was not finished"):
        tiny_run(training__resume=str(cut))
    (attempt,) = cut.iterdir()
    with hold(attempt) as held:
        fcntl.flock(held.descriptor, fcntl.LOCK_EX)
        sweep_leftovers(directory)
        assert cut.exists(), "its writer is still at it"
    sweep_leftovers(directory)
    assert not cut.exists()
    assert mine.exists()
    assert read_checkpoint(path)["step"] == 2


def test_a_directory_that_cannot_be_written_is_a_message(
    tiny_run: MakeRun, save: Callable[[Run, Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "full").write_text("a file where the directory should be")
    with pytest.raises(OSError, match="Not a directory"):
        save(tiny_run(training__max_steps=1)(), tmp_path / "full" / "step_1")


def test_a_directory_that_cannot_be_synced_leaves_nothing_of_the_save(
    tiny_run: MakeRun,
    save: Callable[[Run, Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: HeldDirectory) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    run = tiny_run(training__max_steps=1)()
    monkeypatch.setattr(HeldDirectory, "sync", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        save(run, tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


def test_files_that_the_first_rank_does_not_see_are_told_by_their_rank(
    tiny_run: MakeRun,
    save: Callable[[Run, Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where each machine has a directory of its own by that name."""
    real = Together.each

    def each(self: Together, what: str, work: Callable[[], Any]) -> list[Any]:
        found = real(self, what, work)
        if what == "read back":
            next(tmp_path.glob("step_1/*/*.safetensors")).unlink()
        return found

    monkeypatch.setattr(Together, "each", each)
    with pytest.raises(
        StorageError, match=r"rank 0 has written it.* must share system\.checkpoint"
    ):
        save(tiny_run(training__max_steps=1)(), tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", [fingerprint_for(CPU), eager_fingerprint])
def test_the_sums_of_parts_add_up_to_that_of_the_whole(
    dtype: torch.dtype, kernel: Fingerprint
) -> None:
    whole = torch.randn(101, 77, generator=torch.Generator().manual_seed(5)).to(dtype)
    (wanted,) = sums_of([part_of(whole)], kernel)
    assert wanted == int(kernel([whole])[0]) % (1 << 64)
    for cuts in ([0, 101], [0, 1, 50, 101], [0, 26, 52, 78, 101], [0, 0, 3, 101, 101]):
        parts = [Part(_rows(whole, a, b), 77 * a) for a, b in pairwise(cuts)]
        assert sum(sums_of(parts, kernel)) % (1 << 64) == wanted


def _rows(whole: Tensor, first: int, end: int) -> Tensor:
    return whole[first:end].clone()
