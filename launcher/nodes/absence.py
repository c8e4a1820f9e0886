"""What a launcher owes the others of its job until it has joined them: why it does not come. Else
they would wait for it. Cheap to import: every run does."""

import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.nodes.failures import SILENCE_S, TELL_S
from launcher.nodes.job import meeting_place, name_of_meeting, nodes_of_job
from model_check.config.ranks import JOBS
from model_check.errors import ConfigError
from model_check.utils.files import read_whole
from model_check.utils.project_files import version
from model_check.utils.requests import TO_STOP
from model_check.utils.slurm import SlurmStep
from model_check.utils.threads import start_without_signals

_LOOK_S = 0.1
_TOLD_S = 1.0
"""A person is told of a wait that is longer."""
_JOB = re.compile(rf"\b({'|'.join(JOBS)})\b")
"""In JSON, YAML and TOML."""
_LONGEST = 1 << 20
"""Of a file with settings, bytes."""


class Absence:
    """Of this launcher, on one of several nodes; of another one it tells nobody."""

    def __init__(self) -> None:
        self._step: SlurmStep | None = None
        self._environ: Mapping[str, str] = {}
        self._part = ""

    def guess(self, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
        """A run is asked for, and its settings are not known yet. Whether it looks like a job on
        several nodes."""
        with suppress(ConfigError):  # of Slurm's variables: the run will tell it
            step = nodes_of_job(environ)
            if step is not None and _names_job(argv):
                self.expect(step, environ)
                return True
        return False

    def expect(self, step: SlurmStep | None, environ: Mapping[str, str], part: str = "") -> None:
        """The others wait for this launcher; None: nobody does. From here on requests to end wait
        for an answer: one that ends us at once would tell nobody. `part`: which restart."""
        self._step, self._environ, self._part = step, environ, part
        if step is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, TO_STOP)

    def end(self) -> None:
        """It has come."""
        self._step = None

    def tell(self, why: str, exit_code: int, say: Callable[[str], None]) -> None:
        """For TELL_S at most, and until a second request to end. The first node waits for the
        others, and they for the first."""
        if (step := self._step) is None:
            return
        self._step = None
        # A resolver, or scontrol, may keep a thread waiting for longer.
        thread = threading.Thread(target=self._work, args=(step, why, exit_code), daemon=True)
        with suppress(RuntimeError):  # there is no room for another thread
            start_without_signals(thread)
            _wait(thread, say)

    def _work(self, step: SlurmStep, why: str, exit_code: int) -> None:
        with suppress(Exception):  # what goes wrong here would hide why we leave
            # Runs that begin well do not wait for these imports.
            from launcher.nodes.messages import Failure, Join
            from launcher.nodes.nodes import Nodes

            job, name = name_of_meeting(step, self._part), step.names[step.node]
            failure = Failure(step.node, None, None, why, exit_code)
            join = Join(step.node, job, name, version(), failure=failure)
            nodes = Nodes(step, join, *meeting_place(step, self._environ), SILENCE_S)
            nodes.open(TELL_S)
            nodes.stay()


def _wait(thread: threading.Thread, say: Callable[[str], None]) -> None:
    began, has_said = time.monotonic(), False
    while thread.is_alive() and (waited_s := time.monotonic() - began) < TELL_S:
        if waited_s > _TOLD_S and not has_said:
            has_said = True
            say(f"telling the other nodes of the job, for {TELL_S:.0f} s at most")
        thread.join(_LOOK_S)
        if signal.sigtimedwait(TO_STOP, 0) is not None:
            return


def _names_job(argv: Sequence[str]) -> bool:
    """Whether it looks like a job of ranks: what cannot be understood is refused without settings.
    A mistake costs TELL_S."""
    return any(_names_mode(word) or _file_names_mode(word) for word in argv)


def _names_mode(text: str) -> bool:
    return any(text == mode or text.endswith(f"={mode}") for mode in JOBS)


def _file_names_mode(word: str) -> bool:
    path = Path(word.partition("=")[2] if word.startswith("--") else word)
    with suppress(OSError, ValueError):
        if path.is_file():
            text = read_whole(path, _LONGEST).decode(errors="replace")
            return _JOB.search(text) is not None
    return False
