"""Real shells complete what people type."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_process import answer_of
from tests.tab_key import Shell

SHELLS = ["bash", pytest.param("zsh", marks=pytest.mark.zsh)]


@pytest.fixture(scope="module", params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    cwd = tmp_path_factory.mktemp("shell")
    (cwd / "texts").mkdir()
    printed = answer_of("completion", request.param, cwd=cwd, env={}).stdout
    shell = Shell(request.param, printed, cwd)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("doc", "doctor"),
        ("--req", "--require-idle"),
        ("max_steps=3 training.max_s", "training.max_steps="),
        ("--preset fine", "finetune"),
        ("check ", "burnin full quick"),
        ("check quick --soa", "--soak"),
        ("config ", "show"),
        ("doctor --qui", "--quick"),
        ("config --dry", "--dry"),  # it is for a run
        ("runs ", "clear list open"),
        ("history fo", "forget"),
        ("completion ", "bash zsh"),
        ("help gen", "generate"),
        ("--gpus 0 doc", "doc"),  # a verb comes first
        ("report --go", "--golden"),
        ("replay x --g", "--gpu"),
        ("prepare --old", "--older-than"),
        ("prepare x --pre", "--preprocessed-data --preset"),
        ("generate x --prompt", "--prompt --prompt-midi --prompt-notes --prompts"),
        ("passkey --a", "--arms"),
        ("export --dt", "--dtype"),
        ("train te", "texts"),  # a file
        ("data.dataset=te", "data.dataset=texts"),
        ("report --output te", "texts"),
        ("-- doctor te", "texts"),
        ("nothing-like-it", "nothing-like-it"),
    ],
)
def test_the_tab_key_offers_what_may_follow(shell: Shell, typed: str, offered: str) -> None:
    assert shell.offers(typed) == offered.split()


def test_a_value_may_follow_a_setting_at_once(shell: Shell) -> None:
    assert shell.makes("ch\tqu\ttraining.max_s\t5") == ["check", "quick", "training.max_steps=5"]


def test_another_shell_is_refused_with_the_nearest(tmp_path: Path) -> None:
    done = answer_of("completion", "bsah", cwd=tmp_path, env={})
    assert (done.returncode, done.stdout) == (2, "")
    assert "'bsah': none of bash, zsh; did you mean bash?" in done.stderr
