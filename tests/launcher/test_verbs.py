"""A row of the table of verbs is all that help, dispatch, hints and the Tab key need."""

from pathlib import Path

import pytest

from launcher import cli
from launcher.completion import completion
from launcher.verbs import VERBS, Verb
from model_check.utils.standard_streams import put
from tests.in_process import answer_of
from tests.tab_key import Shell


def answer(cwd: Path, *argv: str) -> str:
    done = answer_of(*argv, cwd=cwd, env={})
    return done.stdout if done.returncode == 0 else f"{done.returncode} {done.stderr}"


def greet(rest: list[str]) -> int:
    put(f"hello {' '.join(rest)}")
    return 0


@pytest.fixture
def _greet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new verb."""
    row = Verb("greet [NAME]", "say hello", words="world", options="--loud", other_names="salute")
    monkeypatch.setitem(VERBS, "greet", row)
    monkeypatch.setattr(cli, "do_greet", greet, raising=False)


@pytest.mark.usefixtures("_greet")
def test_a_new_verb_needs_its_row_and_its_function(tmp_path: Path) -> None:
    assert "\n  greet [NAME]            say hello\n" in answer(tmp_path, "--help")
    assert answer(tmp_path, "greet", "world") == "hello world\n"
    assert answer(tmp_path, "help", "greet") == "hello --help\n"
    for word in ("gret", "salute", "saltue"):
        assert "no such verb; did you mean greet?" in answer(tmp_path, word, "--loud")
        assert "no such verb; did you mean greet?" in answer(tmp_path, "help", word)
    for before in (["--debug"], ["max_steps=3"], ["check", "quick"]):
        told = answer(tmp_path, *before, "greet", "--loud")
        assert told.startswith("2 [launcher] error: greet: a verb comes first: run.sh greet"), told


@pytest.mark.usefixtures("_greet")
@pytest.mark.parametrize("name", ["bash", pytest.param("zsh", marks=pytest.mark.zsh)])
def test_the_tab_key_knows_a_new_verb_by_its_row(tmp_path: Path, name: str) -> None:
    shell = Shell(name, completion([name]), tmp_path)
    assert shell.makes("gre\two\t--lo\t") == ["greet", "world", "--loud"]
    assert shell.offers("help gre") == ["greet"]
    shell.close()


def test_each_verb_is_carried_out() -> None:
    """`help` is another verb's --help."""
    own = [verb.name for verb in VERBS.values() if not verb.program]
    assert [name for name in own if not hasattr(cli, f"do_{name}")] == ["help"]


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        ("--gpsu 1", "--gpus"),
        ("--prest train", "--preset"),
        ("check --gpsu 1", "--gpus"),
        ("train texts/ --resmue auto", "--resume"),
        ("doctor --qiuck", "--quick"),
        ("config show --josn", "--json"),
        ("report r --drian", "--drain"),
        ("runs --jsno", "--json"),
        ("history --fiel x", "--file"),
    ],
)
def test_a_misspelt_option_gets_the_nearest(tmp_path: Path, argv: str, near: str) -> None:
    told = answer(tmp_path, *argv.split())
    assert f": no such option; did you mean {near}? (--help lists them)" in told
