"""Fingerprints on a CPU, by fingerprint.c, which the machine's own compiler compiles once.

At least 8 times as fast as torch's operators (benchmarks/fingerprint_cost.py). The library is kept
in `~/.cache/model_check/kernels` behind its checksum, under a name that depends on all that it is
made of. No file that another user could have written is loaded."""

import ctypes
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_check.forensics.fingerprint import NoKernelError, width_of
from model_check.utils.held import OTHERS_WRITE, HeldDirectory, hold_own, make_unlinked
from model_check.utils.user_cache import user_cache

_SOURCE = Path(__file__).with_name("fingerprint.c")
_COMPILERS = ("cc", "gcc", "clang")
_OPTIONS = ("-O3", "-march=native", "-shared", "-fPIC")
_CHECKSUM_BYTES = 32
"""At the end of a kept file."""
_LARGEST = 1 << 24
_OF_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
"""Lines of /proc/cpuinfo, of x86 and ARM, on which -march=native depends."""
_DEADLINE_S = 10.0
"""gcc takes 0.2 s, 0.5 s on a busy machine."""
_MIN_BYTES_TO_SHARE = 1 << 18
"""Less is done by one thread."""


def c_fingerprint() -> "CompiledFingerprint":
    """The kernel, compiled now where it was not kept. Raises NoKernelError."""
    compiler = _compiler()
    library = _kept(compiler)
    try:
        with tempfile.TemporaryDirectory(prefix="model-check-") as directory:
            path = Path(directory, "fingerprint.so")
            if library is not None:
                path.write_bytes(library)
                return CompiledFingerprint(ctypes.CDLL(str(path)))
            _compile(compiler, path)
            new = path.read_bytes()
            return CompiledFingerprint(ctypes.CDLL(str(path)), partial(_keep, compiler, new))
    except (OSError, AttributeError) as error:  # no place for it, noexec, no library, no function
        raise NoKernelError(f"its compiled kernel cannot be loaded: {error}") from error


def _kept(compiler: str) -> bytes | None:
    """The library that an earlier process compiled, if it is whole."""
    with suppress(OSError), _directory() as directory:
        content = directory.read_own(_name(compiler), _LARGEST)
        library, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        return library if hashlib.sha256(library).digest() == checksum else None
    return None


def _keep(compiler: str, library: bytes) -> None:
    """Do without where that cannot be: the next process compiles it again."""
    with suppress(OSError), _directory() as directory:
        directory.replace(_name(compiler), library + hashlib.sha256(library).digest())


def _directory() -> HeldDirectory:
    """The directory of kept libraries. Raises OSError where another user could write one there."""
    place = user_cache(os.environ) / "kernels"
    if not place.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "no cache directory of this user", str(place))
    make_unlinked(place, 0o700)
    directory = hold_own(place)
    if directory.status().st_mode & OTHERS_WRITE or not directory.is_ours():
        directory.close()
        raise PermissionError(errno.EPERM, "others can write there", str(place))
    return directory


def _name(compiler: str) -> str:
    """Names what the library is made of: source, compiler, options, processor."""
    made_by = os.stat(os.path.realpath(compiler))
    cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    processor = [line for line in cpu if line.startswith(_OF_PROCESSOR)]
    parts = (compiler, made_by.st_size, made_by.st_mtime_ns, _OPTIONS, processor)
    return f"{hashlib.sha256(_SOURCE.read_bytes() + repr(parts).encode()).hexdigest()}.so"


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
    # Its own group: a compiler is a driver, and what hangs may be a process that it started. A
    # person's own Python 3.10 makes a session with it.
    own: dict[str, Any] = {"process_group": 0}
    if sys.version_info < (3, 11):  # noqa: UP036
        own = {"start_new_session": True}
    process = subprocess.Popen(command, env=env, stdin=null, stdout=null, stderr=stderr, **own)
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


class CompiledFingerprint:
    """A Fingerprint. ctypes lets other threads of Python run meanwhile."""

    def __init__(self, library: ctypes.CDLL, keep: Callable[[], None] = lambda: None):
        self.keep = keep
        """Keeps the library for later processes, if it is new. For a caller who has tried it."""
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
            table.extend((x.data_ptr(), x.numel(), width_of(x), first_row))
        sums = torch.zeros(len(held), dtype=torch.int64)
        (address, _) = table.buffer_info()
        num_threads = self._num_threads(held)
        self._function(address, len(held), sums.data_ptr(), self._openmp_at, num_threads)
        return sums

    def _num_threads(self, tensors: Sequence[Tensor]) -> int:
        """As many as torch's own operators take."""
        is_large = sum(x.nbytes for x in tensors) >= _MIN_BYTES_TO_SHARE
        return torch.get_num_threads() if is_large and self._openmp_at else 1
