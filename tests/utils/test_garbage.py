import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, gc, weakref
gc.disable()
from model_check.utils.garbage import keep_imports, leave
keep_imports()
assert gc.isenabled()
assert gc.get_freeze_count() > 1000
class Held:
    pass
held = Held()
weakref.finalize(held, print, "finalized")
held.itself = held
atexit.register(print, "left")
print("not flushed", end=" ")
try:
    leave(7)
finally:
    print("unwound")
"""


def test_a_program_leaves_as_by_sys_exit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (7, b"")
    assert done.stdout.split() == [b"not", b"flushed", b"unwound", b"left", b"finalized"]


COMPILING = """
import os, signal
from torch._inductor.async_compile import AsyncCompile
from model_check.utils.garbage import leave
pool = AsyncCompile.process_pool()
os.kill(pool.process.pid, signal.SIGSTOP)
leave(7)
"""


def test_a_program_does_not_wait_for_a_compiler_that_hangs() -> None:
    """torch alone waits 300 s for it."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILING], cwd=ROOT, capture_output=True, timeout=100
    )
    assert done.returncode == 7, done.stderr


FORKING = """
import subprocess, sys
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
sys.stdin.read()
"""
COMPILED = """
import subprocess, sys
from model_check.utils.garbage import leave
compiler = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=-1)
print(compiler.pid, int(compiler.stdout.readline()), flush=True)
leave(0)
"""


def test_what_a_compiler_forked_ends_with_it(tmp_path: Path) -> None:
    """torch's own look whether their parent is there once a minute."""
    program = tmp_path / "torch" / "_inductor" / "compile_worker" / "__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text(FORKING)
    command = [sys.executable, "-c", COMPILED, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    forked = int(done.stdout.split()[1])
    with suppress(ProcessLookupError):  # dead, or about to be
        pidfd = os.pidfd_open(forked)
        assert select.select([pidfd], [], [], 20)[0], "it lives on"
        os.close(pidfd)
