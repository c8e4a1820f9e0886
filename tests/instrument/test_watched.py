"""Scripts of a person's own, watched: what is told of them, and that they are left as they are."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model_check.events import (
    AskVectors,
    Beat,
    Break,
    Command,
    Credit,
    Done,
    Dump,
    Event,
    Evidence,
    Finished,
    Go,
    Kept,
    NonFinite,
    Note,
    Phase,
    Step,
    Vectors,
)
from model_check.utils.fingerprint import flipped
from tests.instrument.harness import (
    ROOT,
    Ran,
    are_calls_alike,
    keep_in_step,
    plain,
    script,
    watched,
)

NANO = Path(__file__).with_name("nano.py")
PACKAGE = ROOT / "model_check" / "instrument"


def ask_vectors_of_step_3(event: Event) -> list[Command]:
    asked = [AskVectors(step=3)] if isinstance(event, Step) and event.step == 3 else []
    return [*asked, *keep_in_step(event)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return watched(NANO, tmp_path_factory.mktemp("clean"), answer=ask_vectors_of_step_3)


def hidden(directory: Path, text: str) -> dict[str, str]:
    """A sitecustomize of the person's own, which ours hides."""
    directory.mkdir()
    script(directory, text, "sitecustomize.py")
    return {"PYTHONPATH": str(directory)}


def test_each_step_is_told(clean: Ran) -> None:
    names = [event.name for event in clean.of(Phase)]
    assert names == ["import", "build", "train"]
    assert clean.of(Phase)[0].detail == {"schema": 1}
    assert "source nano.py" in clean.of(Phase)[1].detail
    steps = clean.of(Step)
    assert [step.step for step in steps] == list(range(6))
    state = {"weights", "exp_avg", "exp_avg_sq", "step"}
    passes = {"inputs", "forward", "backward", "gradients", "grad_norms"}
    passes |= {"rng.torch", "rng.python", "rng.numpy"}
    assert set(steps[0].fp) == passes | state | {"before.weights"}
    assert set(steps[1].fp) == passes | state | {f"before.{kind}" for kind in state}
    assert {step.repeated for step in steps} == {None}
    assert [float.hex(float(line.split()[1])) for line in clean.stdout.splitlines()[1:7]] == [
        step.loss for step in steps
    ]
    assert steps[0].tokens == 64
    assert list(clean.of(Vectors)[-1].fp["forward"]) == ["h.0", "h.1", "the model"]
    assert isinstance(clean.events[-2], Finished)
    assert clean.events[-1] == Done(
        t=clean.events[-1].t,
        exit_code=0,
        steps=6,
        peak_memory_bytes=clean.of(Done)[0].peak_memory_bytes,
    )


@pytest.mark.parametrize(
    "env",
    [
        {"NANO_OPTIMIZER": "two"},
        {"NANO_OPTIMIZER": "lbfgs"},
        {"NANO_ACCUMULATION": "3"},
        {"NANO_SCALER": "1"},
        {"NANO_COMPILE": "1"},
    ],
    ids=lambda env: "-".join([*env, *env.values()]),
)
def test_a_watched_run_is_the_run_and_two_are_equal(env: dict[str, str], tmp_path: Path) -> None:
    one, other = (watched(NANO, tmp_path / name, env=env) for name in ("a", "b"))
    alone = plain(NANO, tmp_path, env=env)
    assert one.steps == other.steps
    assert one.steps
    of_lbfgs = ", ".join(f"the {kind} of wte.weight" for kind in ("al", "old_dirs", "old_stps"))
    of_lbfgs = f"no fingerprint is taken of {of_lbfgs}, the ro of wte.weight"
    unread = [of_lbfgs] if env == {"NANO_OPTIMIZER": "lbfgs"} else []
    for ran in (one, other):
        assert (ran.exit_code, ran.stdout, ran.stderr) == (0, alone.stdout, alone.stderr)
        assert ran.of(Break) == []
        assert [note.text for note in ran.of(Note)] == unread
        assert ran.of(Done)[0].exit_code == 0


@pytest.mark.parametrize(
    ("kind", "name", "optimizer"),
    [
        ("weight", "h.1.fc.weight", "one"),
        ("exp_avg", "h.0.out.weight", "one"),
        ("exp_avg_sq", "wte.weight", "one"),
        ("momentum_buffer", "h.1.fc.bias", "two"),
    ],
)
def test_a_bit_of_the_state_that_turns_over_is_named(
    kind: str, name: str, optimizer: str, tmp_path: Path
) -> None:
    env = {"NANO_FLIP": f"{kind}:{name}:77", "NANO_OPTIMIZER": optimizer}
    ran = watched(NANO, tmp_path / "a", env=env)
    (found,) = ran.of(Break)
    quantity = "weights" if kind == "weight" else kind
    steps = (7, 5) if optimizer == "two" else (3, 2)
    assert (found.quantity, found.tensor, found.found) == (quantity, name, [(77, 9)])
    assert (found.step, found.since) == steps
    assert ran.exit_code == 0


def test_a_bit_of_a_gradient_is_named_before_it_is_clipped(clean: Ran, tmp_path: Path) -> None:
    env = {"NANO_FLIP": "gradient:h.1.fc.weight:123"}
    ran = watched(NANO, tmp_path / "a", env=env, answer=ask_vectors_of_step_3)
    assert ran.of(Break) == []
    assert ran.steps[:3] == clean.steps[:3]
    ours, theirs = ran.of(Vectors)[0], clean.of(Vectors)[0]
    assert ours.step == theirs.step == 3
    for quantity in ("inputs", "before.weights", "forward", "backward"):
        assert ours.fp[quantity] == theirs.fp[quantity]
    was, now = theirs.fp["gradients"], ours.fp["gradients"]
    (name,) = [name for name in was if was[name] != now[name]]
    size = ours.sizes[name]
    assert name == "h.1.fc.weight"
    assert flipped(int(was[name], 16), int(now[name], 16), *size) == [(123, 9)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_module_that_made_a_nan_is_named(direction: str, clean: Ran, tmp_path: Path) -> None:
    ran = watched(NANO, tmp_path / "a", env={"NANO_NAN": direction})
    assert ran.exit_code == 20
    (found,) = ran.of(NonFinite)
    assert (found.step, found.where) == (3, "gradient")
    assert found.origin is not None
    module = "h.1.fc" if direction == "forward" else "h.0.out"
    assert (found.origin.direction, found.origin.module) == (direction, module)
    assert ran.steps == clean.steps[:3]
    assert [done.exit_code for done in ran.of(Done)] == [20]
    assert "h.1.out.bias" not in found.names or direction == "forward"


AGAIN = {"MODEL_CHECK_REPLAY": "1", "MODEL_CHECK_STOP_AFTER": "2"}


@pytest.mark.parametrize("env", [{}, {"NANO_PART": "1"}, {"NANO_COMPILE": "1"}])
def test_a_replay_calls_what_its_last_step_called_again_and_again(
    env: dict[str, str], tmp_path: Path
) -> None:
    in_run = watched(NANO, tmp_path / "a", env=env).steps[:3]
    ran = watched(NANO, tmp_path / "b", env=env | AGAIN)
    assert ran.steps == in_run
    assert are_calls_alike(ran, watched(NANO, tmp_path / "c", env=env | AGAIN))


RANK_0 = """
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.distributed.init_process_group("fake", rank=0, world_size={size}, store=FakeStore())
"""


@pytest.mark.parametrize("size", ["2", "1"])
@pytest.mark.parametrize("by", ["environment", "torch"])
def test_a_replay_calls_nothing_again_for_which_another_rank_may_wait(
    by: str, size: str, tmp_path: Path
) -> None:
    text = RANK_0.format(size=size) + SMALL if by == "torch" else SMALL
    env = AGAIN if by == "torch" else AGAIN | {"WORLD_SIZE": size}
    ran = watched(script(tmp_path, text), tmp_path / "a", env=env)
    assert len(ran.of(Step)) == 3
    assert bool(ran.of(Phase)[-1].detail) == (size == "1")


@pytest.mark.parametrize(
    "env",
    [
        {"NANO_VARIES": "forward"},
        {"NANO_VARIES": "backward"},
        {"NANO_VARIES": "forward", "NANO_PART": "1"},
    ],
)
def test_an_operation_that_varies_is_told(env: dict[str, str], tmp_path: Path) -> None:
    one, other = (watched(NANO, tmp_path / name, env=env | AGAIN) for name in "ab")
    assert not are_calls_alike(one, other)


def test_a_slow_kernel_takes_a_part_in_each_step_and_everything_in_the_last(
    tmp_path: Path,
) -> None:
    env = {"PATH": "", "MODEL_CHECK_STOP_AFTER": "4"}  # no compiler
    taken = [step["taken"] for step in watched(NANO, tmp_path / "a", env=env).steps]
    assert taken == ["all, all of 11", "all, 1 of 11", "1, 2 of 11", "2, 3 of 11", "3, all of 11"]


def test_a_part_that_is_called_by_itself_is_watched_as_a_model(clean: Ran, tmp_path: Path) -> None:
    ran = watched(NANO, tmp_path / "a", env={"NANO_PART": "1"})
    first, of_whole = ran.of(Step)[0], clean.of(Step)[0]
    assert first.fp.keys() == of_whole.fp.keys()
    assert (first.tokens, first.fp["rng.torch"]) == (of_whole.tokens, of_whole.fp["rng.torch"])


def test_state_that_changed_by_itself_is_told_before_what_came_of_it(
    clean: Ran, tmp_path: Path
) -> None:
    ran = watched(NANO, tmp_path / "a", env={"NANO_FLIP": "weight:h.1.fc.weight:77:30"})
    assert not math.isfinite(float.fromhex(ran.of(Step)[3].grad_norm))
    (found,) = ran.of(Break)
    assert (found.step, found.tensor, found.found) == (3, "h.1.fc.weight", [(77, 30)])
    assert (ran.of(NonFinite), ran.exit_code) == ([], clean.exit_code)


@pytest.mark.parametrize(
    "broken",
    [
        "model_check.instrument.update.WatchedUpdate.take",
        "model_check.instrument.update.WatchedUpdate.end",
        "model_check.hooks.fingerprints.FlowSums.take",
        "model_check.instrument.names.Roots.of",
        "model_check.instrument.watcher.Watcher._stay_in_step",
    ],
)
def test_a_hook_that_raises_ends_the_watching_and_nothing_else(
    broken: str, clean: Ran, tmp_path: Path
) -> None:
    owner, _, name = broken.rpartition(".")
    env = hidden(
        tmp_path / "own",
        f"""
        import pkgutil, torch

        def fail(*args, **kwargs):
            raise RuntimeError("a fault of ours")

        setattr(pkgutil.resolve_name("{owner}"), "{name}", fail)
        """,
    )
    ran = watched(NANO, tmp_path / "a", env=env)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, clean.stdout, "")
    assert ran.of(Done) == []
    if ran.of(Phase):  # it was claimed before
        assert "RuntimeError: a fault of ours" in ran.of(Note)[0].text


def test_a_python_without_msgspec_is_watched_and_its_own_sitecustomize_runs(
    clean: Ran, tmp_path: Path
) -> None:
    text = "import sys; sys.modules['msgspec'] = None; print('mine', file=sys.stderr)"
    ran = watched(NANO, tmp_path / "a", env=hidden(tmp_path / "own", text), is_forked=False)
    assert ran.steps == clean.steps
    assert ran.stderr == "mine\n"


def test_names_of_ours_are_not_taken(tmp_path: Path) -> None:
    text = """
        import torch, sys, importlib.util
        import config, model_check
        print(config.mine, importlib.util.find_spec("launcher"), model_check.__name__)
        print([name for name in sys.modules if name.startswith("launcher")])
        """
    script(tmp_path, "mine = 'my own'", "config.py")
    ran = watched(script(tmp_path, text), tmp_path / "a", is_forked=False)
    assert ran.stdout == "my own None model_check\n[]\n"
    script(tmp_path, "print('hers')", "launcher.py")
    script(tmp_path, "mine = 'another'", "model_check.py")
    text = "import torch, launcher, model_check; print(model_check.mine)"
    ran = watched(script(tmp_path, text), tmp_path / "b", is_forked=False)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "hers\nanother\n", "")
    assert ran.of(Note)[0].text.startswith("not watched: ")


def test_it_needs_nothing_newer_than_python_3_10(tmp_path: Path) -> None:
    found = [shutil.which("python3.10"), *Path.home().glob(".pyenv/versions/3.10*/bin/python")]
    works = (p for p in filter(None, found) if not subprocess.run([p, "-V"]).returncode)
    if (python := next(works, None)) is None:
        pytest.skip("no Python 3.10")
    places = [*PACKAGE.rglob("*.py"), *(ROOT / "model_check" / "forensics").glob("*.py")]
    places += [ROOT / "model_check" / "hooks" / "fingerprints.py"]
    code = "import sys\nfor p in sys.argv[1:]: compile(open(p).read(), p, 'exec')"
    subprocess.run([python, "-c", code, *map(str, places)], check=True)
    of_utils = (
        "fingerprint",
        "held",
        "user_cache",
        "wire",
        "words",
    )  # all that it uses without torch
    modules = ", ".join(f"model_check.utils.{name}" for name in of_utils)
    subprocess.run([python, "-c", f"import {modules}"], check=True, cwd=ROOT)


def test_the_worker_waits_for_its_permit(tmp_path: Path) -> None:
    """It takes the step that it may, and shows that it is alive meanwhile."""
    permit = [0]

    def answer(event: Event) -> list[Command]:
        if isinstance(event, Beat):
            permit[0] += 2
            return [Credit(step=permit[0])]
        return [] if isinstance(event, Step) else keep_in_step(event)

    ran = watched(NANO, tmp_path / "a", env={"NANO_STEPS": "4"}, answer=answer, first=0)
    kinds = [type(e).__name__ for e in ran.events if isinstance(e, Step | Beat | Finished)]
    assert kinds == ["Step", "Beat", "Step", "Step", "Beat", "Step", "Finished"]


def test_state_is_kept_as_evidence_when_it_is_asked_for(tmp_path: Path) -> None:
    name = "weights/h.0.fc.weight"

    def answer(event: Event) -> list[Command]:
        asked: list[Command] = []
        if isinstance(event, Step) and event.step == 2:
            asked = [Dump(step=4, of_step=2, tensors=[name])]
        return [*asked, *keep_in_step(event)]

    ran = watched(NANO, tmp_path / "a", answer=answer)
    kept = ran.of(Kept)[0]
    assert (kept.step, kept.of_step) == (4, 2)
    content = torch.load(ran.of(Evidence)[0].path, weights_only=True)
    assert list(content) == [name]


def test_a_run_ends_behind_the_step_that_was_asked_for(clean: Ran, tmp_path: Path) -> None:
    ran = watched(NANO, tmp_path / "a", env={"MODEL_CHECK_STOP_AFTER": "2"})
    assert ran.exit_code == 0
    assert ran.steps == clean.steps[:3]
    assert ran.of(Done)[0].exit_code == 0
    assert ran.stdout.splitlines() == clean.stdout.splitlines()[:3]


def test_deterministic_operations_are_torchs_own_and_only_warn(tmp_path: Path) -> None:
    text = """
    import torch
    print(torch.are_deterministic_algorithms_enabled())
    print(torch.is_deterministic_algorithms_warn_only_enabled())
    """
    asked = {"MODEL_CHECK_DETERMINISTIC": "1"}
    for env, said in ((asked, ["True", "True"]), ({}, ["False", "False"])):
        ran = watched(script(tmp_path, text), tmp_path / said[0], env=env)
        assert ran.stdout.split() == said


def test_a_script_that_fails_fails_as_before(tmp_path: Path) -> None:
    text = NANO.read_text() + "raise ValueError('mine')\n"
    path = script(tmp_path, text)
    ran, alone = watched(path, tmp_path / "a"), plain(path, tmp_path)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (1, alone.stdout, alone.stderr)
    assert ran.of(Done) == []


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", "{python} {nano} | cat"),
        ("{python}", "-c", "import subprocess, sys; subprocess.run(['{python}', '{nano}'])"),
    ],
)
def test_a_child_that_trains_is_watched(
    command: tuple[str, ...], clean: Ran, tmp_path: Path
) -> None:
    told = [word.format(python=sys.executable, nano=NANO) for word in command]
    ran = watched(NANO, tmp_path / "a", *told)
    assert ran.steps == clean.steps
    assert ran.stdout == clean.stdout


def test_of_two_processes_that_train_one_is_watched(clean: Ran, tmp_path: Path) -> None:
    text = f"import os\nif os.fork():\n    os.wait()\n{NANO.read_text()}"
    ran = watched(script(tmp_path, text), tmp_path / "a")
    assert ran.steps == clean.steps
    (note,) = ran.of(Note)
    assert note.text == "another process trains, too, and is not watched"
    assert note.unwatched
    assert ran.stdout == 2 * clean.stdout


def test_of_the_ranks_of_a_job_the_first_is_watched_whoever_comes_first(tmp_path: Path) -> None:
    text = """
        import sys, torch
        from torch.testing._internal.distributed.fake_pg import FakeStore
        rank = int(sys.argv[1])
        torch.distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5 + rank)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        """
    python = f"{sys.executable} {script(tmp_path, text)}"
    ran = watched(NANO, tmp_path / "a", "bash", "-c", f"{python} 1; {python} 0")
    assert [step.lr for step in ran.of(Step)] == [0.5]
    assert [bool(note.unwatched) for note in ran.of(Note)] == [True]


ODD = """
    import copy, hashlib, io, os, sys, torch
    from torch import nn

    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["slow"] = state.get("slow", 0) * 0.5 + p.grad
                    p.sub_(state["slow"], alpha=0.1)
            return loss

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    net.add_module("unused", nn.Identity())
    net = net.to(memory_format=torch.channels_last)
    net.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    unused = nn.Parameter(torch.ones(5))
    optimizer = Mine([*net.parameters(), unused])
    average = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save(net, file)
    assert b"model_check" not in file.getvalue()
    torch.load(io.BytesIO(file.getvalue()), weights_only=False)(torch.randn(2, 3, 8, 8))

    def closure():
        optimizer.zero_grad()
        x = torch.randn(2, 3, 8, 8)
        loss = net(x).square().mean() + average(x).mean() * 0
        loss.backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)
        return loss

    for step in range(4):
        if os.environ.get("FLIP") and step == 2:
            net[0].weight.data.permute(0, 2, 3, 1).view(-1).view(torch.int32)[11] ^= 1 << 3
        loss = optimizer.step(closure)
        with torch.no_grad():
            for a, p in zip(average.parameters(), net.parameters()):
                a.lerp_(p, 0.1)
    contents = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print(hashlib.sha256(contents).hexdigest())
    """


def test_an_own_optimizer_with_a_closure_and_an_average_of_the_model(tmp_path: Path) -> None:
    path = script(tmp_path, ODD)
    one, other = watched(path, tmp_path / "a"), watched(path, tmp_path / "b")
    alone = plain(path, tmp_path)
    assert (one.exit_code, one.stdout, one.stderr) == (0, alone.stdout, alone.stderr)
    assert one.steps == other.steps
    assert len(one.steps) == 4
    assert one.of(Note) == one.of(Break) == []
    told = one.of(Vectors)[-1].fp
    assert list(told["slow"]) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert told["gradients"]["parameter 6"] == f"{0:016x}"
    (found,) = watched(path, tmp_path / "c", env={"FLIP": "1"}).of(Break)
    assert (found.tensor, found.found, found.step) == ("0.weight", [(11, 3)], 2)


def test_what_has_no_fingerprint_is_told(tmp_path: Path) -> None:
    text = """
        import torch

        class Small(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for p in self.param_groups[0]["params"]:
                    state = self.state[p]
                    state.setdefault("even", torch.zeros(6, dtype=torch.int8)).add_(1)
                    state.setdefault("odd", torch.zeros(3, dtype=torch.uint8)).add_(1)
                    state.setdefault("listed", {"a": [torch.zeros(3)]})
                    state.setdefault("far", torch.empty(3, device="meta"))

        net = torch.nn.Embedding(8, 2, sparse=True)
        optimizer = Small(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.arange(4)).sum().backward()
            optimizer.step()
        """
    ran = watched(script(tmp_path, text), tmp_path / "a")
    (note,) = ran.of(Note)
    assert note.text == (
        "no fingerprint is taken of the gradient of weight, the odd of weight, the listed of "
        "weight, the far of weight"
    )
    assert len({step.fp["even"] for step in ran.of(Step)}) == len(ran.steps) == 4


def test_what_a_script_writes_itself_is_no_fault(tmp_path: Path) -> None:
    text = """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            net.weight.data.clamp_(-0.2, 0.2)
        """
    ran = watched(script(tmp_path, text), tmp_path / "a")
    assert ran.of(Break) == []
    (note,) = ran.of(Note)
    assert note.text == (
        "the script itself changes 1 tensors of its state, first weight, before step 1"
    )


SMALL = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
"""


def test_random_numbers_are_told_where_no_module_is_called(tmp_path: Path) -> None:
    text = """
        import torch
        from torch import nn
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3):
            (weight * torch.randn(4)).sum().backward()
            optimizer.step()
        """
    states = [
        step.fp["rng.torch"] for step in watched(script(tmp_path, text), tmp_path / "a").of(Step)
    ]
    assert len({*states}) == len(states) == 3


GAN = """
    import os, torch
    from torch import nn
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_maker = torch.optim.Adam(maker.parameters())
    of_judge = torch.optim.Adam(judge.parameters())
    for step in range(4):
        if os.environ.get("FLIP") and step == 2:
            maker.weight.data.view(torch.int32)[1, 3] ^= 1 << 9
        judge(maker(torch.randn(2, 4)).detach()).square().sum().backward()
        of_judge.step()
        of_judge.zero_grad()
        judge(maker(torch.randn(2, 4))).sum().backward()
        if os.environ.get("CLIP") and step == 1:
            nn.utils.clip_grad_norm_(maker.parameters(), 0.001)
        if step:
            of_maker.step()
        of_maker.zero_grad()
        of_judge.zero_grad()
"""


def test_a_weight_that_changed_is_named_where_another_optimizer_steps_first(
    tmp_path: Path,
) -> None:
    def ask_in_step_3(event: Event) -> list[Command]:
        is_asked = isinstance(event, Step) and event.step == 3
        asked = [AskVectors(step=3), Credit(step=9)] if is_asked else []
        return [Go()] if isinstance(event, Finished) else asked

    path = script(tmp_path, GAN)
    ran = watched(path, tmp_path / "a", env={"FLIP": "1"}, answer=ask_in_step_3, first=3)
    kinds = [type(event) for event in ran.events if isinstance(event, Step | Break | Vectors)]
    assert kinds[:6] == [*[Step] * 4, Break, Vectors]
    found = ran.of(Break)[0]
    assert (found.tensor, found.found) == ("weight", [(7, 9)])


def test_the_first_clipping_of_an_optimizer_that_steps_late_does_not_hide_its_gradient(
    tmp_path: Path,
) -> None:
    path = script(tmp_path, GAN)
    plain_run, clipped = (watched(path, tmp_path / clip, env={"CLIP": clip}) for clip in ("", "1"))
    one, other = (run.of(Step)[2].fp for run in (plain_run, clipped))
    assert one["gradients"] == other["gradients"]
    assert one["exp_avg"] != other["exp_avg"]


def test_a_module_that_nobody_looks_at_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    """The NaN of a layer that may not be hooked is not said to be born in the next one."""
    text = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net[0].layers[1].linear1.weight.data[0] = torch.nan
        net(torch.randn(2, 4, 8)).sum().backward()
        optimizer.step()
        """
    (found,) = watched(script(tmp_path, text), tmp_path / "a").of(NonFinite)
    assert found.origin is None
    assert "1.weight" in found.names


def test_steps_that_a_cuda_graph_captures_end_the_watching(tmp_path: Path) -> None:
    """The graph is made up."""
    text = f"""{SMALL}
        torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: step == 2
    """
    ran = watched(script(tmp_path, text), tmp_path / "a")
    assert len(ran.of(Step)) == 2
    (note,) = ran.of(Note)
    assert note.text.startswith("not watched from step 2 on: RuntimeError: a CUDA graph captures")
    assert ran.of(Done) == []
    assert ran.exit_code == 0


def test_optimizers_that_step_behind_one_backward_pass_tell_its_loss(tmp_path: Path) -> None:
    losses = [s.loss for s in watched(NANO, tmp_path / "a", env={"NANO_OPTIMIZER": "two"}).of(Step)]
    assert losses[0::2] == losses[1::2]
    assert len({*losses}) == len(losses) / 2 == 6


def test_a_script_whose_backward_passes_begin_at_no_single_value_tells_no_loss(
    tmp_path: Path,
) -> None:
    text = SMALL.replace(".sum().backward()", ".backward(torch.ones(2, 1))")
    ran = watched(script(tmp_path, text), tmp_path / "a")
    assert [step.loss for step in ran.of(Step)] == [None] * 3
    summed = watched(script(tmp_path, SMALL), tmp_path / "b").of(Step)
    assert None not in [step.loss for step in summed]
    assert [step.grad_norm for step in ran.of(Step)] == [step.grad_norm for step in summed]
    text = SMALL.replace(".sum().backward()", ".backward(torch.ones(2, 1) / (step < 2))")
    (found,) = watched(script(tmp_path, text), tmp_path / "c").of(NonFinite)
    assert (found.step, found.loss) == (2, None)


def test_a_step_without_a_loss_does_not_tell_that_of_an_earlier_one(tmp_path: Path) -> None:
    call = "net(torch.randn(2, 4))"
    one, each = f"{call}.sum().backward()", f"{call}.backward(torch.ones(2, 1))"
    text = SMALL.replace(one, f"{one} if step == 1 else {each}")
    told = [step.loss for step in watched(script(tmp_path, text), tmp_path / "a").of(Step)]
    assert [loss is None for loss in told] == [True, False, True]


def test_watch_names_what_the_hooks_of_the_start_cannot_reach(tmp_path: Path) -> None:
    text = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import torch
        from model_check import watch
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(net.parameters())
        watch(net, optimizer)
        for step in range(3):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        """
    path = script(tmp_path, text)
    isolated = watched(path, tmp_path / "a", sys.executable, "-I", str(path))
    assert isolated.stderr == ""
    assert len(isolated.steps) == 3
    at_start = watched(path, tmp_path / "b").steps
    for step in at_start:
        step["fp"].pop("rng.torch")  # it moved before the call of watch
    assert isolated.steps == at_start
    assert "0.weight" in isolated.of(Vectors)[-1].fp["weights"]
    assert plain(path, tmp_path).exit_code == 0
