"""Our own environment: a venv, made once of the pinned versions by one `pip install -c`.

One start installs, others wait for it. The stamp that says "ready" is written last; a start that
was cut off is repaired by the next. A venv is cleared only if its Python does not run. Standard
library only.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.install import requirements
from launcher.install.progress import BEGINS, follow
from launcher.install.requirements import CONSTRAINTS, PYPROJECT, RUN_EXTRAS, Requirement, say
from model_check.errors import InternalError, StorageError, UsageError
from model_check.utils.project_files import PACKAGES

EXTRAS = {"run": RUN_EXTRAS, "check": (*RUN_EXTRAS, "fast", "midi", "dev")}
"""What an environment is made for -> the extras that it gets. One for checks is one to run in."""
LOCK, LOG = "install.lock", "install.log"
"""Who installs, and what pip says."""
WHEELS = "MODEL_CHECK_WHEELS"
"""A directory with all packages, for a machine without network: run.sh sets it for --wheels."""
_COST = "2 to 5 minutes; about 3 GB to download, without CUDA 0.3 GB, and 1.5 GB on disk"
_COST_WITHOUT_TORCH = "about 0.2 GB to download"
"""docs/troubleshooting.md says what of it was measured."""
_NUM_LAST_LINES = 12

# Kept as they are where this machine has them: they are built for its driver and for each other.
_KEPT = ("torch", "numpy")
# Variables that would send pip's work elsewhere, or pin other versions than ours (containers of GPU
# vendors set PIP_CONSTRAINT).
_NOT_FOR_PIP = ("PIP_CONSTRAINT", "PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PYTHONHOME")


def make(venv: Path, purpose: str) -> Path:
    """The Python of the environment `venv`, which is ready for `purpose` on return. One that is
    ready is only read: it may be another user's.

    Raises UsageError (not ours to touch), StorageError (not writable) and InternalError (pip or
    venv failed; their own messages say why).
    """
    if is_ready(venv, purpose):
        return python_of(venv)
    try:
        _claim(venv)
        with _lock(venv / LOCK) as lock:
            if not is_ready(venv, purpose):
                (venv / LOG).unlink(missing_ok=True)
                _install(venv, purpose, lock)
    except OSError as error:
        raise StorageError(
            f"{venv}: cannot make the environment: {error.strerror or error} "
            "(MODEL_CHECK_VENV names another directory)"
        ) from error
    return python_of(venv)


def is_ready(venv: Path, purpose: str) -> bool:
    """Whether the stamp is there and names these requirements and this very interpreter. run.sh
    reads the same in bash, without a Python of its own."""
    try:
        return (venv / f"ready-{purpose}").read_text() == _stamp(venv)
    except FileNotFoundError:
        return False


def _stamp(venv: Path) -> str:
    made_for = hashlib.sha256(PYPROJECT.read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    return f"{made_for}\n{python_of(venv).resolve()}\n"


def _claim(venv: Path) -> None:
    """Create the directory. Refuse one that holds something else, since ours may be cleared."""
    venv.mkdir(parents=True, exist_ok=True)
    names = {entry.name for entry in venv.iterdir()}
    if names and not names & {LOCK, "pyvenv.cfg"}:
        raise UsageError(f"{venv}: not a Python environment, so it is left alone; name another")


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Hold the file's lock, and write our pid into it; yields its descriptor."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"waiting for {file.read() or 'another start'}, which installs into {path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {platform.node()} (since {time.strftime('%H:%M:%S')})")
        file.flush()
        yield file.fileno()


def _install(venv: Path, purpose: str, lock: int) -> None:
    started, python, wheels = time.monotonic(), python_of(venv), _wheels()
    if not _runs(python, "import sys; sys.exit(sys.version_info < (3, 11))"):
        _create(venv, lock, started)
    _remove_half_installed(venv)
    kept = _kept(python)
    needs = requirements.required()
    needs += [need for name in EXTRAS[purpose] for need in requirements.extra(name)]
    wanted = [need for need in needs if need.name not in kept]
    has_torch = "torch" in kept or (venv / "ready-run").exists()
    say(f"installing into {venv}, once: {_extent(wanted, has_torch, wheels)}")
    if kept:
        reused = ", ".join(f"{name} {version}" for name, version in kept.items())
        say(f"reusing {reused} of {sys.executable}")
    if _pip_install(venv, wanted, kept, wheels, lock, started) != 0:
        last = (venv / LOG).read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
        say("\n".join(["the last words of pip:", *last]))
        raise InternalError(
            f"pip could not install the requirements into {venv}; all its words are in "
            f"{venv / LOG}. Connect this machine to a package index and start again; or fill a "
            "directory elsewhere (pip download -r requirements.txt -d DIR) and give --wheels DIR; "
            "or name an interpreter that has them: MODEL_CHECK_PYTHON=/path/to/python"
        )
    for ready_for in {"run", purpose}:
        (venv / f"ready-{ready_for}").write_text(_stamp(venv))
    say(f"installed in {time.monotonic() - started:.0f} s")


def _extent(wanted: Sequence[Requirement], has_torch: bool, wheels: str | None) -> str:
    cost = _COST_WITHOUT_TORCH if has_torch else _COST
    source = f"all from {wheels}" if wheels else cost
    return f"{len(wanted)} packages and what they need ({source})"


def _wheels() -> str | None:
    """Raises UsageError where the directory is none."""
    wheels = os.environ.get(WHEELS)
    if wheels and not os.path.isdir(wheels):
        raise UsageError(f"--wheels {wheels}: no such directory ({WHEELS})")
    return wheels


def _create(venv: Path, lock: int, began: float) -> None:
    """A new venv in place of whatever is there; above the interpreter's own packages where those
    hold a torch that will do."""
    for entry in venv.iterdir():
        if entry.name not in (LOCK, LOG):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    # The interpreter behind the links: this one may be the venv's own, which is gone by now.
    command = [os.path.realpath(sys.executable), "-P", "-m", "venv", "--without-pip"]
    kept = [need for need in requirements.required() if need.name in _KEPT]
    if sys.prefix == sys.base_prefix and not requirements.lacking(kept):
        command.append("--system-site-packages")
    if _call([*command, str(venv)], venv, lock, began) != 0:
        raise InternalError(f"{shlex.join(command)} failed: {venv / LOG} has its own words")


def _remove_half_installed(venv: Path) -> None:
    """What a killed pip leaves would pass for installed: it copies the files, metadata among them,
    and writes INSTALLER after all of them. Packages that it was replacing are left as `~name`."""
    for packages in venv.glob("lib/python3*/site-packages"):
        cut_off = [d for d in packages.glob("*.dist-info") if not (d / "INSTALLER").exists()]
        for directory in [*cut_off, *packages.glob("~*")]:
            shutil.rmtree(directory)


def _kept(python: Path) -> dict[str, str]:
    """What a venv above the interpreter's own packages uses of them: name -> version."""
    command = [str(python), "-P", "-m", "launcher.install.requirements", *_KEPT]
    environ = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    lines = subprocess.check_output(command, env=environ, text=True).splitlines()
    return dict(line.split("==") for line in lines)


def _pip_install(
    venv: Path,
    wanted: Sequence[Requirement],
    kept: dict[str, str],
    wheels: str | None,
    lock: int,
    began: float,
) -> int:
    constraints = venv / "constraints.txt"
    versions = requirements.pins() | kept
    constraints.write_text("".join(f"{name}=={v}\n" for name, v in versions.items()))
    command = [*_pip(venv, lock, began), "install", "--disable-pip-version-check"]
    command += ["--no-index", "--find-links", wheels] if wheels else []
    return _call([*command, "--constraint", str(constraints), *map(str, wanted)], venv, lock, began)


def _pip(venv: Path, lock: int, began: float) -> list[str]:
    """A pip that installs into `venv`: its own, else the one of the interpreter that runs this.
    Debian has ensurepip in a package of its own."""
    python = python_of(venv)
    own = [str(python), "-P", "-m", "pip"]
    if _runs(python, "import pip"):
        return own
    if _runs(python, "import ensurepip"):
        if _call([str(python), "-P", "-m", "ensurepip", "--default-pip"], venv, lock, began) == 0:
            return own
    elif _runs(Path(sys.executable), "import pip"):
        return [sys.executable, "-P", "-m", "pip", "--python", str(python)]
    raise UsageError(
        f"{sys.executable} has no pip to install with (on Debian and Ubuntu: apt install "
        "python3-venv)"
    )


def _call(command: Sequence[str], venv: Path, lock: int, began: float) -> int:
    """Run it to its end, with all its output in the log; the exit code. It holds the lock, too: if
    we are killed, the next start waits for it instead of installing beside it."""
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_PIP}
    # A `user = true` in a pip.conf fails in a venv.
    env["PIP_USER"] = "0"
    # As -P, for the Pythons that pip and ensurepip start: the working directory may hold a pip.py.
    env["PYTHONSAFEPATH"] = "1"
    with (venv / LOG).open("ab") as log:
        log.write(f"{BEGINS}{shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,)
        )
    return follow(process, venv / LOG, began)


def _runs(python: Path, code: str) -> bool:
    command = [str(python), "-P", "-c", code]
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"
