"""A process that imports once what ranks need, then forks one for each rank of each job. torch
costs a process 1 s of CPU, and what DDP imports of it another.

`python -m tests.engine.nursery FD`: a job comes as one JSON message, with the socket that its first
rank listens on; the exit codes of its ranks go back."""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from model_check.utils.worker_env import STORE_FD
from tests.deadline import DEADLINE_S
from tests.engine.conftest import ROOT

_MAX_MESSAGE = 1 << 16


class Nursery:
    """Our end. Close it: its ranks end with it."""

    def __init__(self) -> None:
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._jobs.settimeout(DEADLINE_S)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.nursery", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def train(
        self,
        plan: dict[str, Any],
        environments: Sequence[dict[str, str]],
        listener: socket.socket,
        outputs: Sequence[Path],
    ) -> list[int]:
        """The exit codes of the ranks; what they say is in the files `outputs`."""
        job = {"plan": plan, "env": environments, "out": [str(path) for path in outputs]}
        socket.send_fds(self._jobs, [json.dumps(job).encode()], [listener.fileno()])
        codes: list[int] = json.loads(self._jobs.recv(_MAX_MESSAGE))
        return codes

    def close(self) -> None:
        self._jobs.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(jobs_fd: int) -> None:
    jobs = socket.socket(fileno=jobs_fd)
    for module in ("tests.engine.ranks", "torch._dynamo"):  # DDP imports the second
        importlib.import_module(module)
    from model_check.forensics.fingerprint import fingerprint_for

    fingerprint_for(torch.device("cpu"))  # compiled once
    gc.freeze()  # a search for garbage in a rank would copy these pages
    while True:
        message, fds, _, _ = socket.recv_fds(jobs, _MAX_MESSAGE, 1)
        if not message:
            return
        job = json.loads(message)
        ranks = [
            _fork(job["plan"], env, out, fds[0])
            for env, out in zip(job["env"], job["out"], strict=True)
        ]
        os.close(fds[0])
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        jobs.sendall(json.dumps(codes).encode())


def _fork(plan: dict[str, Any], env: dict[str, str], output: str, listener: int) -> int:
    if pid := os.fork():
        return pid
    if env.get(STORE_FD):
        env[STORE_FD] = str(listener)
    else:
        os.close(listener)
    _become_rank(plan, env, output)


def _become_rank(plan: dict[str, Any], env: dict[str, str], output: str) -> NoReturn:
    program = importlib.import_module(plan.get("program", "tests.engine.ranks"))
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(env)
    exit_code = 1
    try:
        program.main(plan)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
