"""The arms of a comparison (--mode compare): what the command line says of them. Pure."""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from model_check.config.arguments import with_dashes
from model_check.config.fields import flatten, setting_of
from model_check.config.layers import Layer, command_line
from model_check.config.load import Request
from model_check.errors import ConfigError, UsageError
from model_check.utils.secrets import masked

BOTH = "--run-both-models"
_OPTION = "--arm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,39}")
_FILES = (".log", ".json", ".html")
"""Endings of files that lie beside the arms."""
_WORKER = re.compile(r"(cpu|gpu)[0-9.]+", re.IGNORECASE)
_OF_ALL = ("launch.", "system.device", "system.seed", "system.checkpoint_dir", "logging.log_dir")
"""Beginnings of settings that are one for all arms."""


class Arm(Struct, frozen=True):
    name: str
    overrides: tuple[str, ...]
    """`section.key=value`, in order."""

    @property
    def layer(self) -> Layer:
        """Its settings. Raises ConfigError, and UsageError for one that is not an arm's."""
        label = f"{_OPTION} {self.name}"
        pairs = (override.partition("=") for override in self.overrides)
        values = {key.strip(): value.strip() for key, _, value in pairs}
        layer = flatten(values, label, text=True)
        for name in layer:
            if name.startswith(_OF_ALL):
                raise UsageError(f"{label}: {name} is one for all arms: give it before them")
        return label, layer

    def of(self, request: Request) -> Request:
        """What is asked for of this arm. Raises as `layer`."""
        return replace(request, arm=(*request.arm, self.layer))


BOTH_ARMS = (Arm("full", ("model.attention=full",)), Arm("infini", ("model.attention=infini",)))
"""What BOTH stands for."""


def split_arms(argv: Sequence[str]) -> tuple[list[str], tuple[Arm, ...]]:
    """The command line without its arms; and these. Raises UsageError."""
    rest: list[str] = []
    arms: list[Arm] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        option, _, given = with_dashes(word).partition("=")
        if option == BOTH:
            arms += BOTH_ARMS
        elif option == _OPTION:
            name = given or (words.pop(0) if words else "")
            arms.append(Arm(name, tuple(_taken(words))))
        else:
            rest.append(word)
    _check_names([arm.name for arm in arms])
    for arm in arms:
        for word in arm.overrides:
            if "=" not in word:
                raise UsageError(f"{_OPTION} {arm.name}: {word!r} is not section.key=value")
    return rest, tuple(arms)


def refuse_overruled(request: Request, arms: Sequence[Arm]) -> None:
    """Raises ConfigError for a setting of the command line that every arm gives otherwise."""
    for label, layer in command_line(request.overrides, request.flags):
        if layer.get("launch.mode", "compare") != "compare":
            raise ConfigError(f"{label}: has no arms; launch.mode=compare has")
    in_all = set.intersection(*({*map(setting_of, arm.layer[1])} for arm in arms))
    for label, layer in command_line(request.overrides, request.flags):
        if overruled := in_all & {*map(setting_of, layer)}:
            raise ConfigError(f"{label}: each arm gives its own {min(overruled)}: leave it out")


def _taken(words: list[str]) -> list[str]:
    """Taken from the front of `words`: those up to the next option."""
    plain = [with_dashes(word) for word in words]  # --training.max_steps=3 is a setting
    end = next((at for at, word in enumerate(plain) if word.startswith("-")), len(words))
    del words[:end]
    return plain[:end]


def _check_names(names: Sequence[str]) -> None:
    """They are directories, too, also where `Full` and `full` are one. Raises UsageError."""
    seen: Mapping[str, str] = {}
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{_OPTION} {name}: give it a name first, of letters, digits and ._+- (at most "
                "40), then key=value ..."
            )
        if masked(name) != name:
            raise UsageError(f"{_OPTION} {masked(name)}: this name looks like a secret")
        is_ours = name.lower() == "launcher" or name.lower().endswith(_FILES)
        if _WORKER.fullmatch(name) or is_ours:
            raise UsageError(f"{_OPTION} {name}: a worker or a file has such a name: another one")
        if name.lower() in seen:
            both = f"{seen[name.lower()]} and {name}"
            raise UsageError(f"{_OPTION}: {both}: each arm needs a name of its own")
        seen = {**seen, name.lower(): name}
