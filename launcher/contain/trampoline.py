"""What a worker's process runs for a few milliseconds before it becomes the worker's command.

Ties its life to the supervisor's, enters the run's cgroup, so that whatever the command starts is
inside, resets signals and limits, then execs. Not a `preexec_fn`, which is unsafe in a process that
has threads. Imports little: every worker's start waits for it.
"""

import errno
import os
import resource

from launcher.contain.linux import die_with_parent, reset_signals

EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


def main(arguments: list[str]) -> None:
    """`PARENT_PID REPORT_FD CGROUP_FD CPUS DROP_LC_CTYPE COMMAND ARG...` (CGROUP_FD: a number or
    ``; CPUS: `10,12` or ``): become COMMAND.

    Never returns. When that fails, REPORT_FD gets the errno and the reason. When it succeeds, the
    exec closes REPORT_FD: an empty report says that the command's own code runs.
    """
    parent_pid, report_fd, cgroup_fd, cpus, drop_lc_ctype, *command = arguments
    os.set_inheritable(int(report_fd), False)
    try:
        die_with_parent(int(parent_pid))
        if cgroup_fd:
            enter(int(cgroup_fd))
        if cpus:
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
        raise_file_limit()
        if drop_lc_ctype == "1":
            # Python itself sets it in an environment without a locale (PEP 538), -I or not.
            os.environ.pop("LC_CTYPE", None)
        reset_signals()
        os.execvpe(command[0], command, os.environ)
    except (OSError, ValueError) as error:
        _report(int(report_fd), error, command[0])


def enter(cgroup_fd: int) -> None:
    """Move this process into the run's cgroup and close the descriptor, which the command must not
    have. Raises OSError (ENODEV) when the guardian has removed the cgroup: the run is over."""
    try:
        os.write(cgroup_fd, b"0")
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise
        os.write(2, f"not in the run's cgroup: {error.strerror}\n".encode())
    os.close(cgroup_fd)


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report(report_fd: int, error: OSError | ValueError, program: str) -> None:
    """Never returns."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
    why = os.strerror(number)
    if number == errno.ENOENT and os.path.exists(program):
        why += " (the file exists: the interpreter that its #! line names does not)"
    elif number == errno.ENOEXEC:
        why += " (neither a program for this machine nor a script with a #! line)"
    elif number == errno.ENODEV:
        why = "the run's cgroup was removed"
    text = f"{errno.errorcode.get(number, number)}: {program}: {why}"
    os.write(report_fd, text.encode(errors="surrogateescape"))
    os._exit(EXIT_NOT_FOUND if number == errno.ENOENT else EXIT_CANNOT_EXECUTE)
