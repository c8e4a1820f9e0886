"""Starts scripts as forks of one Python that has imported torch, which takes seconds. A script sees
its own arguments, directory, environment and files, and ends as Python ends; random numbers begin
alike in each. Run as a program, this is that Python."""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_MOST_BYTES = 1 << 20


class Fork:
    """A script that runs, in the words of subprocess.Popen."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = int(control.recv(_MOST_BYTES))
        self._exit_code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError."""
        if self._exit_code is None:
            self._control.settimeout(timeout)
            self._exit_code = int(self._control.recv(_MOST_BYTES))
        return self._exit_code

    def kill(self) -> None:
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Forks:
    """The Python that forks. One script at a time."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={name: value for name, value in environ.items() if name != "PYTHONPATH"},
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self,
        script: Path,
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO[str],
        stderr: IO[str],
        pass_fds: Sequence[int] = (),
    ) -> Fork:
        """`pass_fds`: one at most."""
        self._control.settimeout(None)
        asked = {"script": str(script), "cwd": str(cwd), "env": dict(env), "fds": [*pass_fds]}
        fds = [stdout.fileno(), stderr.fileno(), *pass_fds]
        socket.send_fds(self._control, [json.dumps(asked).encode()], fds)
        return Fork(self._control)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns in each fork what it is to run, and its files; None: no more are asked for."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 3)
        if not data:
            return None
        if (pid := os.fork()) == 0:
            control.close()
            return json.loads(data), fds
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        control.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(asked: dict[str, Any], files: list[int]) -> None:
    """As `python SCRIPT` would go on behind its import of torch."""
    for file, number in zip(files, [1, 2, *asked["fds"]], strict=True):
        if file != number:
            os.dup2(file, number)
            os.close(file)
        os.set_inheritable(number, True)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    script = asked["script"]
    sys.argv = [script]
    sys.path[:1] = [os.path.dirname(script), *filter(None, _python_path())]
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        import sitecustomize  # noqa: F401
    if "MODEL_CHECK_INSTRUMENT" in os.environ:
        from model_check.instrument.install import install

        install()
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__file__ = script
    with open(script) as source:
        code = compile(source.read(), script, "exec")
    exec(code, vars(main))


def _python_path() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)


if __name__ == "__main__":
    # Behind all that a script registers: garbage of torch is looked for once more at the end, which
    # takes twice as long as such a script.
    atexit.register(gc.freeze)
    import torch._dynamo  # noqa: F401 - the first optimizer of a process imports it, too

    if asked := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _run(*asked)
