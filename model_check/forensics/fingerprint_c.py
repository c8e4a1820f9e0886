"""Fingerprints on a CPU, by fingerprint.c, which the machine's own compiler makes for this process.

At least 8 times as fast as torch's operators (benchmarks/fingerprint_cost.py)."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model_check.forensics.fingerprint import Fingerprint, NoKernelError

_SOURCE = Path(__file__).with_name("fingerprint.c")
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-O3", "-march=native", "-shared", "-fPIC")
_DEADLINE_S = 10.0
"""gcc takes 0.2 s, 0.5 s on a busy machine."""
_MIN_BYTES_TO_SHARE = 1 << 18
"""Less is done by one thread."""


def c_fingerprint() -> Fingerprint:
    """Compile the kernel and load it, out of a directory that nobody else can write to and that is
    gone afterwards: no library that lies anywhere is ever loaded. Raises NoKernelError."""
    try:
        with tempfile.TemporaryDirectory(prefix="model-check-") as directory:
            library = Path(directory, "fingerprint.so")
            _compile(_compiler(), library)
            return _Compiled(ctypes.CDLL(str(library)))
    except (OSError, AttributeError) as error:  # no place for it, noexec, no library, no function
        raise NoKernelError(f"its compiled kernel cannot be loaded: {error}") from error


def _compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise NoKernelError(f"no C compiler ({', '.join(_COMPILERS)}) in PATH")


def _compile(compiler: str, library: Path) -> None:
    messages = library.with_suffix(".messages")
    command = (compiler, *_OPTIONS, "-o", str(library), str(_SOURCE))
    # ccache would take what it once made; TMPDIR: what the compiler leaves there goes, too.
    env = {**os.environ, "CCACHE_DISABLE": "1", "LC_ALL": "C", "TMPDIR": str(library.parent)}
    with messages.open("wb") as stderr:
        exit_code = _run(command, env, stderr.fileno())
    if exit_code:
        said = messages.read_text(errors="replace").strip().splitlines()
        raise NoKernelError(f"{compiler} ended with {exit_code}: {said[-1] if said else 'no word'}")


def _run(command: Sequence[str], env: dict[str, str], stderr: int) -> int:
    """The exit code. Whatever the command started ends with it."""
    null = subprocess.DEVNULL
    # Its own group: a compiler is a driver, and what hangs may be a process that it started.
    process = subprocess.Popen(
        command, env=env, stdin=null, stdout=null, stderr=stderr, process_group=0
    )
    try:
        return process.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise NoKernelError(f"{command[0]} took longer than {_DEADLINE_S:.0f} s") from error
    finally:
        if process.returncode is None:  # else its number may be another's by now
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _OpenMP(ctypes.Structure):
    """`struct openmp`"""

    _fields_ = [(name, ctypes.c_void_p) for name in ("parallel", "thread_num", "num_threads")]


def _torchs_openmp() -> _OpenMP | None:
    """Whichever torch is linked with; the names are those of gcc's, which clang's and Intel's have,
    too. None: this torch has none."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        found = (ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p) for name in names)
        return _OpenMP(*found)
    except (OSError, AttributeError):
        return None


class _Compiled:
    """A Fingerprint. ctypes lets other threads of Python run meanwhile."""

    def __init__(self, library: ctypes.CDLL):
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._function = library.fingerprint
        self._function.argtypes = (pointer, number, pointer, pointer, ctypes.c_uint)
        self._function.restype = None
        self._openmp = _torchs_openmp()
        self._openmp_at = None if self._openmp is None else ctypes.addressof(self._openmp)

    def __call__(
        self, tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None
    ) -> Tensor:
        held = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        table = array("q")
        for x, first_row in zip(held, first_rows or [0] * len(held), strict=True):
            table.extend((x.data_ptr(), x.numel(), x.element_size(), first_row))
        sums = torch.zeros(len(held), dtype=torch.int64)
        (address, _) = table.buffer_info()
        num_threads = self._num_threads(held)
        self._function(address, len(held), sums.data_ptr(), self._openmp_at, num_threads)
        return sums

    def _num_threads(self, tensors: Sequence[Tensor]) -> int:
        """As many as torch's own operators take."""
        is_large = sum(x.nbytes for x in tensors) >= _MIN_BYTES_TO_SHARE
        return torch.get_num_threads() if is_large and self._openmp_at else 1
