"""Who may import whom, held against the real imports; and what a start of the launcher may cost."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[1]
FLOOR = {"model_check.config", "model_check.errors", "model_check.events", "model_check.utils"}


def rooms(house: str, *names: str) -> set[str]:
    return {f"{house}.{name}" for name in names}


LAUNCHER, DATA, ENGINE = "launcher", "model_check.data", "model_check.engine"

# Room -> what of this project it may import besides itself. A room is a folder; a file that has a
# row of its own is a room, too. A row of the house itself holds the loose files without one.
ALLOWED = {
    "model_check.errors": set(),
    "model_check.events": {"model_check.utils"},
    "model_check.utils": {"model_check.errors"},
    "model_check.config": {"model_check.errors", "model_check.utils"},
    # the supervisor, from the cellar up
    "launcher.run_dir": FLOOR,
    "launcher.contain": FLOOR,
    "launcher.gpus": FLOOR | {"launcher.contain"},
    "launcher.install": FLOOR,
    "launcher.verdict": FLOOR,
    "launcher.plan": FLOOR | {"launcher.gpus", "launcher.run_dir"},
    "launcher.devices": FLOOR | {"launcher.gpus", "launcher.plan"},
    "launcher.output": FLOOR | {"launcher.run_dir"},
    "launcher.telemetry": FLOOR | rooms(LAUNCHER, "gpus", "output", "run_dir", "verdict"),
    "launcher.nodes": FLOOR | {"launcher.plan", "launcher.verdict"},
    "launcher.supervise": FLOOR | rooms(LAUNCHER, "contain", "output", "plan", "verdict"),
    "launcher.history": FLOOR | rooms(LAUNCHER, "contain", "run_dir", "verdict"),
    "launcher.report.files": FLOOR,
    "launcher.report.read_run": FLOOR
    | {"launcher.report.files"}
    | rooms(LAUNCHER, "run_dir", "verdict"),
    "launcher.report.table": FLOOR | {"launcher.verdict"},
    "launcher.report.page": FLOOR
    | {"launcher.report.files", "launcher.report.table", "model_check.forensics.manifest"}
    | rooms(LAUNCHER, "run_dir", "telemetry", "verdict"),
    "launcher.report.golden": FLOOR | {"launcher.report.files", "launcher.verdict"},
    "launcher.report.comparison": FLOOR
    | rooms("launcher.report", "files", "page", "read_run", "table")
    | rooms(LAUNCHER, "run_dir", "verdict"),
    "launcher.report.fleet": FLOOR
    | rooms("launcher.report", "comparison", "files", "golden", "page", "read_run")
    | rooms(LAUNCHER, "run_dir", "verdict"),
    "launcher.report.watch": FLOOR | {"launcher.output", "launcher.report"},
    "launcher.report": FLOOR
    | rooms("launcher.report", "comparison", "files", "fleet", "golden", "page", "read_run")
    | {"launcher.report.table"}
    | rooms("model_check.forensics", "compare", "manifest")
    | rooms(LAUNCHER, "run_dir", "telemetry", "verdict"),
    "launcher.doctor": FLOOR
    | rooms(LAUNCHER, "contain", "devices", "gpus", "history", "install", "plan", "run_dir")
    | rooms(LAUNCHER, "report.table", "telemetry", "verdict"),
    "launcher.compare.arms": FLOOR,
    "launcher": FLOOR
    | rooms(LAUNCHER, "compare.arms", "contain", "devices", "doctor", "gpus", "history", "install")
    | rooms(LAUNCHER, "nodes", "output", "plan", "report", "report.files", "report.golden")
    | rooms(LAUNCHER, "run_dir", "supervise", "telemetry", "verdict"),
    # runs of runs, and the command line above all
    "launcher.compare": FLOOR
    | {"launcher"}
    | rooms(LAUNCHER, "compare.arms", "contain", "devices", "doctor", "gpus", "output", "plan")
    | rooms(LAUNCHER, "report.comparison", "run_dir", "supervise", "verdict"),
    "launcher.repeat": FLOOR
    | {"launcher"}
    | rooms(LAUNCHER, "contain", "devices", "gpus", "history", "output", "plan", "report")
    | rooms(LAUNCHER, "report.read_run", "run_dir", "verdict"),
    "launcher.preview": FLOOR
    | {"launcher"}
    | rooms(LAUNCHER, "compare", "compare.arms", "devices", "gpus", "output", "plan", "verdict"),
    "launcher.cli": FLOOR
    | {"launcher"}
    | rooms(LAUNCHER, "compare", "compare.arms", "devices", "doctor", "gpus", "history", "nodes")
    | rooms(
        LAUNCHER, "output", "preview", "repeat", "report", "report.watch", "run_dir", "verdict"
    ),
    "launcher.__main__": FLOOR | {"launcher.cli"},
    # the worker's world, from the cellar up
    "model_check.data.read": FLOOR,
    "model_check.data.cache": FLOOR | rooms(DATA, "read"),
    # notes as the names of tokens: a source reads them, a model says them
    "model_check.data.sources.midi": FLOOR | rooms(DATA, "read"),
    "model_check.data.sources": FLOOR | rooms(DATA, "cache", "read", "sources.midi"),
    "model_check.data.tokenizers": FLOOR | rooms(DATA, "cache", "read", "sources", "sources.midi"),
    "model_check.data.build": FLOOR | rooms(DATA, "cache", "read", "sources", "tokenizers"),
    # the model: attention's kernels, LLaMA, what else attention can be, its first weights
    "model_check.attention": FLOOR,
    "model_check.kernels": FLOOR | {"model_check.attention"},
    "model_check.products": set(),
    "model_check.model": FLOOR | rooms("model_check", "attention", "products"),
    "model_check.infini": FLOOR | rooms("model_check", "model", "attention", "products"),
    "model_check.init": FLOOR | rooms("model_check", "model", "attention"),
    "model_check.hf": FLOOR | {"model_check.init"},
    # what a dossier is: the launcher reads it, too, without torch
    "model_check.forensics.manifest": FLOOR,
    "model_check.forensics.compare": FLOOR | {"model_check.forensics.manifest"},
    "model_check.forensics": FLOOR | rooms("model_check.forensics", "compare", "manifest"),
    # the format of the files: the export reads it, too
    "model_check.engine.sharded": FLOOR | {"model_check.dist", "model_check.forensics"},
    "model_check.engine.checkpoint": FLOOR
    | {"model_check.engine.sharded", "model_check.forensics"},
    "model_check.engine.busy": FLOOR,
    # the ranks of one job
    "model_check.dist": FLOOR
    | {"model_check.engine.busy", *rooms("model_check", "forensics", "model")},
    # AdamW, and float16's loss scale
    "model_check.loss_scale": set(),
    "model_check.optim": FLOOR | rooms("model_check", "dist", "forensics", "kernels", "loss_scale"),
    # what a step is to its hooks, and their interface
    "model_check.engine.results": FLOOR | {"model_check.dist", "model_check.engine.busy"},
    "model_check.hooks.hook": FLOOR | {"model_check.engine.results"},
    "model_check.engine": FLOOR
    | {"model_check.loss_scale", "model_check.optim"}
    | {"model_check.data.read", "model_check.engine.checkpoint"}
    | rooms(ENGINE, "busy", "results", "sharded")
    | {"model_check.dist"}
    | {"model_check.forensics.manifest"}
    | rooms("model_check", "forensics", "hf", "hooks.hook", "kernels", "model", "attention"),
    "model_check.engine.saving": FLOOR
    | {"model_check.loss_scale"}
    | {ENGINE, "model_check.data.read", "model_check.engine.checkpoint"}
    | rooms(ENGINE, "sharded")
    | {"model_check.dist"}
    | rooms("model_check", "forensics", "hf", "init"),
    # the loop, what computes with it, its hooks
    "model_check.train": FLOOR
    | {"model_check.optim"}
    | {ENGINE, "model_check.data.read", "model_check.dist", *rooms(ENGINE, "busy", "results")}
    | rooms("model_check", "hooks.hook", "model"),
    "model_check.engine.compile": FLOOR
    | {ENGINE, "model_check.engine.results", *rooms("model_check", "kernels", "model", "train")},
    # hooks for any loop, then those that know ours
    "model_check.hooks": FLOOR
    | {"model_check.loss_scale", "model_check.optim"}
    | {
        ENGINE,
        "model_check.engine.checkpoint",
        "model_check.dist",
        *rooms(ENGINE, "busy", "results"),
    }
    | rooms("model_check", "forensics", "forensics.manifest", "hooks.hook"),
    # a person's own script: what its Python lacks is not in it
    "model_check.instrument": rooms("model_check", "forensics", "hooks", "utils"),
    "model_check.hooks.evaluate": FLOOR
    | {ENGINE, "model_check.data.read", "model_check.dist"}
    | rooms("model_check", "hooks", "hooks.hook", "hooks.save", "model", "train"),
    "model_check.hooks.overflow": FLOOR
    | {"model_check.loss_scale"}
    | {ENGINE, "model_check.engine.results"}
    | rooms("model_check", "forensics", "hooks", "train"),
    "model_check.hooks.sample": FLOOR | {ENGINE, *rooms("model_check", "hooks", "hooks.hook")},
    "model_check.hooks.save": FLOOR
    | {ENGINE, *rooms(ENGINE, "checkpoint", "saving")}
    | rooms("model_check", "hooks", "hooks.hook"),
    "model_check.hooks.observe": FLOOR
    | {"model_check.optim"}
    | {ENGINE, *rooms(ENGINE, "checkpoint", "results")}
    | rooms("model_check", "hooks", "hooks.hook"),
    "model_check.engine.training_run": FLOOR | {ENGINE, "model_check.train"},
    "model_check.engine.hook_list": FLOOR
    | {ENGINE, "model_check.engine.saving"}
    | rooms("model_check", "forensics", "hooks", "hooks.evaluate", "hooks.hook", "hooks.sample")
    | rooms("model_check", "hooks.save", "train"),
    "model_check.engine.assembly": FLOOR
    | {"model_check.loss_scale", "model_check.optim"}
    | {
        ENGINE,
        *rooms("model_check", "forensics", "hooks", "hooks.observe", "hooks.overflow", "init"),
    }
    | {*rooms("model_check", "attention", "model", "products", "train")}
    | {*rooms(ENGINE, "compile", "hook_list", "saving", "training_run")},
    "model_check.generate": FLOOR
    | rooms(DATA, "read", "sources", "sources.midi", "tokenizers")
    | rooms("model_check", "hf", "init", "library", "model", "attention")
    | {"model_check.engine.checkpoint", "model_check.engine.saving"},
    "model_check.passkey": FLOOR
    | {ENGINE, "model_check.engine.assembly", "model_check.data.read", "model_check.model"},
    "model_check.library": FLOOR
    | {"model_check.engine.checkpoint", *rooms("model_check", "init", "model", "attention")},
    "model_check.export": FLOOR
    | {"model_check.engine.checkpoint", "model_check.engine.saving"}
    | rooms(DATA, "read", "sources", "tokenizers"),
}

# Each outside package that any file imports -> the only files that may, by prefix.
SINGLE_PLACE = {
    "pynvml": ("launcher/gpus/nvml.py",),
    "filelock": ("model_check/utils/lock.py",),
    "psutil": ("model_check/utils/interfaces.py",),
    "json5": ("model_check/config/files.py",),
    "dotenv": ("model_check/utils/dotenv.py",),
    "yaml": ("model_check/config/files.py",),
    "datasets": ("model_check/data/sources/hub_text.py",),
    "pyarrow": ("model_check/data/sources/file_piece.py",),
    "huggingface_hub": ("model_check/data/sources/", "model_check/export.py"),
    "tokenizers": ("model_check/data/",),
    "gigatoken": ("model_check/data/tokenizers/backends.py",),
    "tiktoken": ("model_check/data/tokenizers/",),
    "transformers": ("model_check/data/sources/chat.py",),
    "symusic": ("model_check/data/sources/midi.py",),
    "miditok": ("model_check/data/sources/midi.py",),
    "flash_attn": ("model_check/attention.py",),
    "triton": ("model_check/forensics/fingerprint_triton.py",),
    "rich": ("launcher/report/live_table.py",),
    "msgspec": ("launcher/", "model_check/"),
    "torch": ("model_check/",),
    "numpy": (
        "model_check/data/",
        "model_check/engine/",
        "model_check/forensics/",
        "model_check/generate/",
        "model_check/instrument/generators.py",
    ),
    "jinja2": ("launcher/report/page/render.py",),
    "markupsafe": ("launcher/report/page/render.py",),
    "tensorboard": ("model_check/hooks/observe/tensorboard.py",),
    "safetensors": (
        "model_check/engine/sharded/",
        "model_check/export.py",
        "model_check/hf.py",
    ),
}

SOURCES = [p for package in ("launcher", "model_check") for p in (ROOT / package).rglob("*.py")]


def imported(path: Path) -> set[str]:
    """The modules that a file imports; of `from package import module` the module alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {_module(f"{node.module}", alias.name) for alias in node.names}
    return names


def _module(package: str, name: str) -> str:
    whole = ROOT.joinpath(*package.split("."), name)
    is_module = whole.is_dir() or whole.with_suffix(".py").is_file()
    return f"{package}.{name}" if is_module else package


def package_of(module: str) -> str | None:
    """The row of the table that a module of this project belongs to."""
    rows = [row for row in ALLOWED if module == row or module.startswith(f"{row}.")]
    return max(rows, key=len, default=None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    if path.name == "__init__.py":
        return
    own = package_of(module_of(path))
    assert own is not None
    used = {package_of(name) for name in imported(path)} - {None, own}
    assert used <= ALLOWED[own], f"{path} imports {used - ALLOWED[own]}"


def test_no_room_imports_in_a_circle() -> None:
    """The table itself has none, so nothing that keeps to it has one."""
    remaining = {room: set(below) for room, below in ALLOWED.items()}
    while lowest := [room for room, below in remaining.items() if not below & remaining.keys()]:
        for room in lowest:
            del remaining[room]
    assert not remaining


def test_every_folder_is_a_room() -> None:
    houses = {"launcher", "model_check", DATA}
    folders = {module_of(path) for path in SOURCES if path.name == "__init__.py"}
    assert folders - houses <= ALLOWED.keys()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_an_outside_package_is_imported_in_one_place(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    tops = {name.partition(".")[0] for name in imported(path)}
    for package in tops - sys.stdlib_module_names - {"launcher", "model_check"}:
        assert place.startswith(SINGLE_PLACE.get(package, "nowhere")), f"{place} imports {package}"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"])
def test_package_files_carry_a_docstring_and_nothing_else(path: Path) -> None:
    if path == ROOT / "model_check" / "__init__.py":
        return  # the door for other people's programs: it imports only when it is asked
    (only,) = ast.parse(path.read_text()).body
    assert isinstance(only, ast.Expr)


def fresh(code: str) -> str:
    """Run `code` in a new interpreter from the checkout; what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout


def test_the_launcher_starts_without_the_heavy_packages() -> None:
    heavy = "torch numpy transformers datasets tokenizers pyarrow rich jinja2 yaml json5"
    code = f"import launcher.cli, sys; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert fresh(code).strip() == "[]"


def test_preparing_data_starts_without_torch_and_transformers() -> None:
    code = (
        "import model_check.data.build.prepare, sys;"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert fresh(code).strip() == "[]"


def test_dossiers_are_read_and_compared_without_torch() -> None:
    code = "import model_check.forensics.__main__, sys; print('torch' in sys.modules)"
    assert fresh(code).strip() == "False"


def test_nobody_imports_the_launcher() -> None:
    """But for the first line of both programs, which finds their environment."""
    programs = [ROOT / "pretrain_main.py", ROOT / "prepare_dataset.py"]
    outside = [p for p in SOURCES if "launcher" not in p.relative_to(ROOT).parts]
    found = {
        (path, name)
        for path in (*outside, *programs)
        for name in imported(path)
        if name.startswith("launcher")
    }
    assert found == {(path, "launcher.install.by_hand") for path in programs}
