"""The compiled fingerprints give the sums of the formula; where none can be had, torch's do."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_check.forensics import fingerprint, fingerprint_c
from model_check.forensics.fingerprint import Fingerprint, eager_fingerprint, fingerprint_for
from model_check.forensics.fingerprint_c import c_fingerprint
from model_check.utils.fingerprint import NUM_COLUMNS, column_weight, row_weight
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
CPU = torch.device("cpu")
NOBODY = 65534
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (1023,), (1024,), (1025,), (40, 1000), (2, 3, 700)]
WIDTHS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_the_formula(tensor: Tensor, first_row: int) -> int:
    total = 0
    for n, bits in enumerate(tensor.contiguous().view(WIDTHS[tensor.element_size()]).view(-1)):
        row, column = divmod(n, NUM_COLUMNS)
        total += int(bits) * row_weight(first_row + row) * column_weight(column)
    return total % (1 << 64)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where libraries are kept. No test has the kernel that an earlier one has made, nor leaves its
    own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fingerprint._fast.cache_clear()
    yield tmp_path / "cache" / "model_check" / "kernels"
    fingerprint._fast.cache_clear()


@pytest.fixture(scope="module")
def compiled() -> Fingerprint:
    return c_fingerprint()


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_compiler
def test_without_openmp_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_c, "_torchs_openmp", lambda: None)
    x = torch.randn(500_000)
    assert torch.equal(c_fingerprint()([x]), eager_fingerprint([x]))


def test_the_openmp_of_torch_is_found() -> None:
    """Threads of its own would take turns with torch's, which spin for a while."""
    assert fingerprint_c._torchs_openmp() is not None


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
def test_what_is_large_is_shared_by_the_threads_of_torch(num_threads: int) -> None:
    kernel = c_fingerprint()
    asked: list[int] = []
    compute = kernel._function  # type: ignore[attr-defined]
    kernel._function = lambda *call: (asked.append(call[-1]), compute(*call))  # type: ignore[attr-defined]
    kernel([torch.ones(10)])
    kernel([torch.ones(40_000)] * 2)
    assert asked == [1, num_threads]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_c_kernel_gives_the_sums_of_the_formula(
    compiled: Fingerprint, dtype: torch.dtype
) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in [(), (1,), (1025,), (3, 700)]]
    found = [value % (1 << 64) for value in compiled(tensors, [0, 1, 70, 3]).tolist()]
    assert found == [by_the_formula(x, row) for x, row in zip(tensors, [0, 1, 70, 3], strict=True)]


@needs_compiler
@pytest.mark.parametrize("num_threads", [1, 2, 3, 100], indirect=True)
def test_the_c_kernel_gives_the_sums_of_torch(compiled: Fingerprint, num_threads: int) -> None:
    shapes = [*SHAPES, (700, 1001), (3,)]
    for dtype in DTYPES:
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        rows = [n * n for n in range(len(tensors))]
        assert torch.equal(compiled(tensors, rows), eager_fingerprint(tensors, rows))
    mixed = [torch.randn(400_000).to(dtype) for dtype in DTYPES]
    assert torch.equal(compiled(mixed), eager_fingerprint(mixed))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_c_kernel_reads_views(compiled: Fingerprint, dtype: torch.dtype) -> None:
    x = torch.randn(3001).to(dtype)
    views = [x[1:], x[1::2], x[:3000].view(30, 100).T, torch.nn.Parameter(x)[7:9]]
    assert torch.equal(compiled(views), eager_fingerprint(views))


@needs_compiler
def test_the_highest_and_lowest_values_are_summed_without_a_loss(compiled: Fingerprint) -> None:
    for dtype in (torch.int16, torch.int32, torch.int64):
        ends = torch.iinfo(dtype)
        x = torch.tensor([ends.min, ends.max, -1, 0], dtype=dtype).repeat(2000)
        assert torch.equal(compiled([x]), eager_fingerprint([x]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder in PATH; a place for temporary files, in which nothing may stay."""
    path, temporary = tmp_path / "bin", tmp_path / "tmp"
    path.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield path
    assert list(temporary.iterdir()) == []


def install(machine: Path, script: str) -> None:
    """A compiler: `$out` is what it shall write, `$source` what it shall read."""
    place = machine / "cc"
    read = 'for source; do :; done\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n'
    place.write_text(f"#!/bin/sh\n{read}{script}\n")
    place.chmod(0o755)


def assert_torch_does_it(obstacle: str) -> None:
    kernel = fingerprint_for(CPU)
    assert kernel.name == "eager"
    assert obstacle in kernel.obstacle
    assert torch.equal(kernel([torch.ones(5)]), eager_fingerprint([torch.ones(5)]))


# -- what is compiled once


COUNTS = f'echo >> {{log}}; exec {COMPILER} -O1 -shared -fPIC -o "$out" "$source"'


@pytest.fixture
def num_compiled(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """Chooses a kernel, and tells how often the compiler has run by now."""
    log = tmp_path / "log"
    log.touch()
    install(machine, COUNTS.format(log=log))
    monkeypatch.setenv("PATH", f"{machine}:/usr/bin:/bin")

    def chosen() -> int:
        fingerprint._fast.cache_clear()
        kernel = fingerprint_for(CPU)
        assert kernel.name == "c"
        x = torch.randn(3001)
        assert torch.equal(kernel([x]), eager_fingerprint([x]))
        return len(log.read_text())

    return chosen


@needs_compiler
def test_the_kernel_is_compiled_once(num_compiled: Callable[[], int], kept: Path) -> None:
    assert [num_compiled() for _ in range(3)] == [1, 1, 1]
    assert kept.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("change", ["source", "compiler", "options", "processor"])
def test_another_one_is_compiled_of_other_things(
    num_compiled: Callable[[], int],
    machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    assert num_compiled() == 1
    source = tmp_path / "other.c"
    source.write_text(fingerprint_c._SOURCE.read_text() + "\n")
    match change:
        case "source":
            monkeypatch.setattr(fingerprint_c, "_SOURCE", source)
        case "compiler":
            os.utime(machine / "cc", ns=(1, 1))
        case "options":
            monkeypatch.setattr(fingerprint_c, "_OPTIONS", (*fingerprint_c._OPTIONS, "-g"))
        case _:
            monkeypatch.setattr(fingerprint_c, "_OF_PROCESSOR", ("bogomips", "BogoMIPS"))
    assert [num_compiled(), num_compiled()] == [2, 2]


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"fingerprint", b"footprints!", 1)),
        lambda path: path.write_bytes(b""),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: path.parent.chmod(0o777),
        lambda path: path.parent.chmod(0o770),
    ],
    ids=["cut", "changed", "empty", "a directory", "a link", "a pipe", "all write", "group writes"],
)
def test_what_is_damaged_or_could_be_anothers_is_not_loaded(
    num_compiled: Callable[[], int], kept: Path, damage: Callable[[Path], object]
) -> None:
    assert num_compiled() == 1
    (path,) = kept.iterdir()
    damage(path)
    assert num_compiled() == 2


@needs_compiler
@pytest.mark.root
@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_library_of_another_user_is_not_loaded(
    num_compiled: Callable[[], int], kept: Path, what: str
) -> None:
    assert num_compiled() == 1
    (path,) = kept.iterdir()
    os.chown(path if what == "file" else kept, NOBODY, NOBODY)
    assert num_compiled() == 2


@needs_compiler
@pytest.mark.parametrize("place", ["/dev/null/cache", "relative"])
def test_where_nothing_can_be_kept_each_process_compiles(
    num_compiled: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """A home that nobody knows gives a relative path: nothing is made in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    assert [num_compiled(), num_compiled()] == [1, 2]
    assert not (tmp_path / place).exists()


@needs_compiler
def test_a_library_that_gives_other_sums_is_not_kept(
    machine: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = "s/0xBF58476D1CE4E5B9/0xBF58476D1CE4E5B7/"
    install(machine, f'sed "{change}" "$source" | {COMPILER} -shared -fPIC -xc - -o "$out"')
    monkeypatch.setenv("PATH", f"{machine}:/usr/bin:/bin")
    assert_torch_does_it("gives other sums than torch")
    assert not list(kept.iterdir())


# -- a compiler, or none


@needs_compiler
def test_a_compiler_gives_the_c_kernel_and_leaves_nothing(machine: Path) -> None:
    install(machine, f'exec {COMPILER} -O1 -shared -fPIC -o "$out" "$source"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{machine}:/usr/bin:/bin")
        kernel = fingerprint_for(CPU)
    assert (kernel.name, kernel.obstacle) == ("c", "")
    x = torch.randn(500_000)
    assert torch.equal(kernel([x]), eager_fingerprint([x]))


def test_without_a_compiler_torch_does_it(machine: Path) -> None:
    assert_torch_does_it("no C compiler (cc, gcc, clang) in PATH")


def test_a_compiler_that_fails_is_quoted(machine: Path) -> None:
    install(machine, "echo cc: out of spirits >&2; exit 3")
    assert_torch_does_it("ended with 3: cc: out of spirits")


def test_a_compiler_that_cannot_be_started_is_told(machine: Path) -> None:
    (machine / "cc").write_text("neither script nor program")
    (machine / "cc").chmod(0o755)
    assert_torch_does_it("cannot be loaded: [Errno 8] Exec format error")


@pytest.mark.parametrize("script", ["exit 0", 'echo garbage > "$out"', ': > "$out"'])
def test_a_compiler_that_writes_no_library_is_told(machine: Path, script: str) -> None:
    install(machine, script)
    assert_torch_does_it("its compiled kernel cannot be loaded: ")


def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"

    class Hangs(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and not started.exists():
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(fingerprint_c, "_DEADLINE_S", 0.1)
    monkeypatch.setattr(subprocess, "Popen", Hangs)
    install(
        machine,
        f"/bin/sleep 1000 & echo $! > {started}.part\nmv=/bin/mv\n"
        f"$mv {started}.part {started}\nwait",
    )
    assert_torch_does_it("took longer than")
    await_end(int(started.read_text()))


def await_end(pid: int) -> None:
    """A killed process is a zombie until the first of its namespace takes it."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} lives")


@needs_compiler
@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ("s/0xBF58476D1CE4E5B9/0xBF58476D1CE4E5B7/", "gives other sums than torch"),
        ("s/^void fingerprint/void footprint/", "undefined symbol: fingerprint"),
    ],
)
def test_a_kernel_that_computes_something_else_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, change: str, obstacle: str
) -> None:
    pipe = f'sed "{change}" "$source" | {COMPILER} -shared -fPIC -xc - -o "$out"'
    install(machine, pipe)
    monkeypatch.setenv("PATH", f"{machine}:/usr/bin:/bin")
    assert_torch_does_it(obstacle)


@needs_compiler
@pytest.mark.root
def test_a_place_that_runs_no_programs_is_told(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-o", "remount,noexec", str(small_disk)], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    assert_torch_does_it("its compiled kernel cannot be loaded: ")
    assert list(small_disk.iterdir()) == []


def test_a_place_for_temporary_files_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert_torch_does_it("No such file or directory")


def test_a_device_without_a_kernel_of_ours_has_that_of_torch() -> None:
    kernel = fingerprint_for(torch.device("meta"))
    assert (kernel.name, kernel.obstacle) == ("eager", "there is no faster kernel for meta")


@needs_compiler
def test_a_process_compiles_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_torch_does_it("no C compiler")  # which is looked for again
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    kernel = fingerprint_for(CPU)
    monkeypatch.setenv("PATH", str(machine))
    assert fingerprint_for(CPU) is kernel
    assert kernel.name == "c"


def test_to_choose_a_kernel_takes_no_random_number() -> None:
    before = torch.get_rng_state()
    fingerprint_for(CPU)
    assert torch.equal(torch.get_rng_state(), before)


WORKER = """
import torch
from model_check.forensics.fingerprint import fingerprint_for
torch.set_num_threads(2)
kernel = fingerprint_for(torch.device("cpu"))
print(kernel.name, kernel([torch.arange(1_000_000, dtype=torch.float32)]).item())
"""


@needs_compiler
def test_workers_that_start_at_once_agree() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen((sys.executable, "-c", WORKER), env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=DEADLINE_S)[0] for process in started}
    (expected,) = eager_fingerprint([torch.arange(1_000_000, dtype=torch.float32)]).tolist()
    assert said == {f"c {expected}\n"}


@needs_compiler
def test_threads_of_python_use_it_at_once(compiled: Fingerprint) -> None:
    x = torch.randn(600_000)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(compiled([x] * 5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {int(value) for value in found} == set(eager_fingerprint([x]).tolist())
    assert len(found) == 20


INTERPRETED = """
import torch
from model_check.forensics.fingerprint import eager_fingerprint
from model_check.forensics.fingerprint_triton import triton_fingerprint
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    shapes = ((), (1,), (1025,), (40, 1000), (2, 3, 700), (16384,), (16385,), (0,))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors += [tensors[3].T, torch.randn(2001).to(dtype)[1:]]
    rows = [0, 7, 3, 0, 520_000, 1, 2, 3, 4, 5]
    assert torch.equal(triton_fingerprint(tensors, rows), eager_fingerprint(tensors, rows))
    assert torch.equal(triton_fingerprint(tensors[:1]), eager_fingerprint(tensors[:1]))
mixed = [torch.randn(3000), torch.randn(3000).bfloat16(), torch.randn(()), torch.randn(5).half()]
assert torch.equal(triton_fingerprint(mixed), eager_fingerprint(mixed))
"""


@pytest.mark.triton
def test_the_gpu_kernel_gives_the_sums_of_torch_in_tritons_interpreter() -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)),
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        (sys.executable, "-c", INTERPRETED),
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_gpu_kernel_is_taken_on_a_gpu_and_gives_the_sums_of_a_cpu() -> None:
    kernel = fingerprint_for(torch.device("cuda"))
    assert (kernel.name, kernel.obstacle) == ("triton", "")
    for dtype in DTYPES:
        tensors = [torch.randn(shape).to(dtype) for shape in [*SHAPES, (2000, 1001)]]
        tensors += [tensors[6].T, tensors[-1].view(-1)[1:]]
        rows = list(range(len(tensors)))
        found = kernel([x.cuda() for x in tensors], rows)
        assert torch.equal(found.cpu(), eager_fingerprint(tensors, rows))
