"""Exit codes are a contract."""

import pytest

from model_check import errors


def test_every_class_owns_the_documented_code() -> None:
    codes = {
        errors.UsageError: 2,
        errors.ConfigError: 2,
        errors.DataError: 2,
        errors.StorageError: 2,
        errors.CheckpointError: 2,
        errors.NonFiniteError: 20,
        errors.NoGpuError: 69,
        errors.InternalError: 70,
    }
    assert {kind: kind.exit_code for kind in codes} == codes


@pytest.mark.parametrize(
    ("returncode", "code", "words"),
    [
        (0, 0, "exit code 0"),
        (7, 7, "exit code 7"),
        (-9, 137, "killed by SIGKILL (9)"),
        (-15, 143, "killed by SIGTERM (15)"),
        (-40, 168, "killed by signal (40)"),
    ],
)
def test_a_return_code_becomes_what_a_shell_reports(returncode: int, code: int, words: str) -> None:
    assert errors.exit_code_of(returncode) == code
    assert errors.describe_exit(returncode) == words
