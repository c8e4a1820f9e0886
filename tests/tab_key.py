"""A real shell on a terminal, whose user presses the Tab key."""

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

from tests.deadline import DEADLINE_S

_ALL = "\x0f"
"""A key that inserts everything that Tab would offer."""
_SHELLS = {
    "bash": (
        ("bash", "--noprofile", "--norc", "-i"),
        f"bind 'set enable-bracketed-paste off'; bind '\"{_ALL}\": insert-completions'",
    ),
    "zsh": (
        ("zsh", "-f", "-i"),
        f"zle -C all complete-word _generic; bindkey '{_ALL}' all\n"
        "zstyle ':completion:all:*' completer _all_matches _complete\n"
        "zstyle ':completion:all:*' insert true",
    ),
}
_RUN_SH = """run.sh() { printf ANSWER; printf '<%s>' "$@"; echo END; }"""


class Shell:
    def __init__(self, name: str, script: str, cwd: Path) -> None:
        """`script` is what `run.sh completion NAME` prints."""
        command, key = _SHELLS[name]
        (cwd / "rc").write_text(f"{script}\n{_RUN_SH}\n{key}\n")
        here = {"HOME": str(cwd), "HISTFILE": "/dev/null", "TERM": "dumb", "PS1": ""}
        self._terminal, end = pty.openpty()
        self._shell = subprocess.Popen(
            command,
            stdin=end,
            stdout=end,
            stderr=end,
            cwd=cwd,
            env={"PATH": os.environ["PATH"], **here},
            start_new_session=True,
        )
        os.close(end)
        self._arguments("source ./rc; run.sh ready")

    def offers(self, typed: str) -> list[str]:
        """What may become of the last word of `run.sh TYPED`; itself: nothing is offered."""
        before = typed.rpartition(" ")[0].split()
        return self._arguments(f"run.sh {typed}{_ALL}")[len(before) :]

    def makes(self, keys: str) -> list[str]:
        """The arguments that run.sh gets when somebody types these keys, Tab among them."""
        return self._arguments(f"run.sh {keys}")

    def close(self) -> None:
        self._shell.kill()
        self._shell.wait()
        os.close(self._terminal)

    def _arguments(self, line: str) -> list[str]:
        os.write(self._terminal, f"{line}\n".encode())
        shown, end = "", time.monotonic() + DEADLINE_S
        while (answer := re.search("ANSWER(.*)END", shown)) is None:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._terminal], [], [], left)[0], f"no answer: {shown!r}"
            shown += os.read(self._terminal, 65536).decode()
        return re.findall("<(.*?)>", answer[1])
