"""Python imports this at its start in a command that `run.sh check -- COMMAND` supervises: as soon
as the command imports torch, its optimizers are watched. Needs the standard library alone."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from typing import Any

# As in model_check.utils.wire, which needs a package.
_EVENTS_FD, _ROOT = "MODEL_CHECK_EVENTS_FD", "MODEL_CHECK_INSTRUMENT"


class _OwnPackage:
    """Finds `model_check`, where the command's own Python has none, and nothing else of ours."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = os.environ.get(_ROOT)
        return PathFinder.find_spec(name, [root]) if root and name == "model_check" else None


class _AfterTorch:
    """Finds torch as everybody does, and acts when it has been imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Acts as the loader that it stands for."""

    def __init__(self, spec: ModuleSpec, loader: Any) -> None:
        self._spec, self._loader = spec, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._spec.loader = module.__loader__ = self._loader  # nobody sees ours
        self._loader.exec_module(module)
        try:
            from model_check.instrument.install import install

            install()
        except Exception as error:  # the command goes on, whatever it is
            _tell(f"not watched: {type(error).__name__}: {error}")


def _tell(text: str) -> None:
    """To the supervisor, not to the person's own output."""
    import json
    from contextlib import suppress
    from time import monotonic_ns

    line = json.dumps({"kind": "note", "t": monotonic_ns(), "text": text})
    with suppress(OSError, ValueError):
        os.write(int(os.environ[_EVENTS_FD]), f"{line}\n".encode())


def _run_the_hidden_one(here: str) -> None:
    """The sitecustomize that ours hides: of a distribution, conda, coverage."""
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _pass_the_socket_on() -> None:
    """`accelerate launch` and its like start the training as a child, without our socket."""
    import subprocess

    fd, before = int(os.environ[_EVENTS_FD]), subprocess.Popen.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        env = kwargs.get("env") or os.environ
        watched = sys.modules.get("model_check.instrument.install")
        if (
            kwargs.get("close_fds", True)
            and _EVENTS_FD in env
            and not (watched and watched.claimed())
        ):
            kwargs["pass_fds"] = (*kwargs.get("pass_fds", ()), fd)
        before(self, *args, **kwargs)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


def _has_socket() -> bool:
    from stat import S_ISSOCK

    try:
        return S_ISSOCK(os.fstat(int(os.environ[_EVENTS_FD])).st_mode)
    except (KeyError, ValueError, OSError):
        return False


if os.environ.get(_ROOT) and _has_socket():
    sys.meta_path.insert(0, _AfterTorch)
    sys.meta_path.append(_OwnPackage)
    _pass_the_socket_on()
_run_the_hidden_one(os.path.dirname(os.path.realpath(__file__)))
