"""Who runs what, with which environment: data in, data out."""

from pathlib import Path

from msgspec.structs import replace

from launcher.gpus.probe import Gpu
from launcher.plan import (
    PYTHONPATH_BEFORE,
    LaunchContext,
    Meeting,
    ReplayPlan,
    cpu_places,
    gpu_places,
    plan_command,
    plan_prepare,
    plan_replay,
    plan_training,
)
from launcher.verdict.own_command import CheckedCommand
from model_check.utils.project_files import PROJECT
from model_check.utils.wire import DETERMINISTIC, HELD, INSTRUMENT, REPLAY, SEED, STOP_AFTER
from model_check.utils.worker_env import RANK_VARIABLES, STORE_FD

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
H100 = Gpu(
    index=3,
    uuid="GPU-33333333-0000",
    name="NVIDIA H100",
    pci_bus_id="00000000:1B:00.0",
    total_mib=81559,
    used_mib=0,
    cpus=frozenset({4, 5}),
)


def context(**environ: str) -> LaunchContext:
    return LaunchContext(
        environ=environ,
        run_dir=Path("/runs/r1"),
        num_cores=16,
        token_cache=Path("/cache/entry"),
    )


def test_an_interactive_python_is_nothing_for_our_children_but_for_foreign_commands() -> None:
    wanted = {"PYTHONINSPECT": "1", "PYTHONSTARTUP": "rc.py"}
    for spec in (*plan_training(cpu_places(1), context(**wanted)), plan_prepare(context(**wanted))):
        assert not wanted.keys() & spec.env.keys()
    (spec,) = plan_command(cpu_places(1), ["tool"], context(**wanted))
    assert wanted.items() <= spec.env.items()


def test_a_gpu_worker_is_pinned_by_uuid_and_named_by_index() -> None:
    (spec,) = plan_training(gpu_places([H100]), context())
    assert spec.name == "GPU3"
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-33333333-0000"
    assert spec.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert spec.env["GPU_RANK"] == "3"
    assert spec.env["MODEL_CHECK_GPU_UUID"] == "GPU-33333333-0000"
    assert spec.env["MODEL_CHECK_WORKER"] == "GPU3"
    assert spec.log_path == Path("/runs/r1/gpu3.log")
    assert spec.events_path == Path("/runs/r1/gpu3.events.jsonl")
    assert spec.cpus == {4, 5}


def test_cores_are_divided_among_the_workers_unless_a_person_decided() -> None:
    specs = plan_training(cpu_places(4), context())
    assert [spec.env["OMP_NUM_THREADS"] for spec in specs] == ["4"] * 4
    (own, _) = plan_training(cpu_places(2), context(OMP_NUM_THREADS="3"))
    assert own.env["OMP_NUM_THREADS"] == "3"


def test_threads_wait_without_spinning_where_others_work_unless_a_person_decided() -> None:
    busy = replace(context(), is_busy=True)
    assert [spec.env["OMP_WAIT_POLICY"] for spec in plan_training(cpu_places(2), busy)] == [
        *("passive", "passive")
    ]
    own = replace(context(OMP_WAIT_POLICY="active"), is_busy=True)
    assert plan_training(cpu_places(1), own)[0].env["OMP_WAIT_POLICY"] == "active"
    (idle,) = plan_training(cpu_places(1), context())
    (foreign,) = plan_command(cpu_places(1), ["tool"], busy)
    assert "OMP_WAIT_POLICY" not in idle.env | foreign.env


def test_a_cpu_worker_sees_no_gpu() -> None:
    (spec, _) = plan_training(cpu_places(2), context(CUDA_VISIBLE_DEVICES="0,1"))
    assert spec.env["CUDA_VISIBLE_DEVICES"] == ""


def test_only_the_preparer_gets_the_token_of_the_hub() -> None:
    shared = context(HF_TOKEN="hf_secret")
    assert plan_prepare(shared).env["HF_TOKEN"] == "hf_secret"
    (spec, _) = plan_training(cpu_places(2), shared)
    assert "HF_TOKEN" not in spec.env
    assert spec.env["MODEL_CHECK_TOKEN_CACHE"] == "/cache/entry"


def test_the_same_settings_reach_the_preparer_and_every_worker() -> None:
    shared = context()
    specs = [plan_prepare(shared), *plan_training(cpu_places(2), shared)]
    for spec in specs:
        at = spec.argv.index("--config")
        assert spec.argv[at + 1] == "/runs/r1/config.json"


def test_a_foreign_command_gets_its_own_python_path_back() -> None:
    changed = context(PYTHONPATH="/checkout:/mine", **{PYTHONPATH_BEFORE: "/mine"})
    (spec,) = plan_command(gpu_places([H100]), ["tool", "a b"], changed)
    assert spec.argv == ("tool", "a b")
    assert spec.env["PYTHONPATH"] == "/mine"
    assert PYTHONPATH_BEFORE not in spec.env
    (bare,) = plan_command(gpu_places([H100]), ["tool"], context(**{PYTHONPATH_BEFORE: ""}))
    assert "PYTHONPATH" not in bare.env


def test_a_checked_command_gets_its_instruments_before_its_own_python_path() -> None:
    site = f"{PROJECT}/model_check/instrument/site"
    changed = context(PYTHONPATH="/ours:/theirs", **{PYTHONPATH_BEFORE: "/theirs"})
    held, plain = cpu_places(2)
    changed = replace(changed, held=frozenset({held.name}))
    check = CheckedCommand(seed=7, max_steps=20)
    first, second = plan_command([held, plain], ["tool"], changed, check)
    told = {
        "PYTHONPATH": f"{site}:/theirs",
        "PYTHONHASHSEED": "0",
        INSTRUMENT: str(PROJECT),
        SEED: "7",
        STOP_AFTER: "19",
    }
    assert told.items() <= second.env.items()
    assert HELD not in second.env
    assert first.env[HELD] == "1"
    own = context(PYTHONHASHSEED="random", PYTHONPATH="", **{PYTHONPATH_BEFORE: ""})
    (bare,) = plan_command(cpu_places(1), ["tool"], own, CheckedCommand())
    assert (bare.env["PYTHONPATH"], bare.env["PYTHONHASHSEED"]) == (site, "random")
    assert not {SEED, STOP_AFTER, HELD, DETERMINISTIC, CUBLAS} & bare.env.keys()


def test_a_deterministic_command_gets_a_workspace_that_repeats_unless_a_person_decided() -> None:
    check = CheckedCommand(deterministic=True)
    (spec,) = plan_command(cpu_places(1), ["tool"], context(), check)
    assert (spec.env[DETERMINISTIC], spec.env[CUBLAS]) == ("1", ":4096:8")
    (own,) = plan_command(cpu_places(1), ["tool"], context(**{CUBLAS: ":16:8"}), check)
    assert own.env[CUBLAS] == ":16:8"


def test_a_command_is_computed_again_as_in_its_run_up_to_the_step_of_the_fault() -> None:
    """With the threads of the run: another number may round otherwise."""
    check = CheckedCommand(seed=7, deterministic=True, max_steps=20)
    places = cpu_places(4)
    shared = replace(context(), held=frozenset({"CPU0", "CPU1"}))
    again = ReplayPlan(to_step=3, number=2, command=["tool"], check=check)
    specs = plan_replay(places[:2], len(places), shared, again)
    for spec, before in zip(specs, plan_command(places, ["tool"], shared, check), strict=False):
        assert (spec.name, spec.argv) == (before.name, before.argv)
        assert spec.env == before.env | {STOP_AFTER: "3", REPLAY: "1"}
        assert spec.log_path == Path(f"/runs/r1/{spec.name.lower()}.replay2.log")
        assert not spec.announces_itself


def test_the_ranks_of_a_job_see_all_gpus_and_meet_at_a_port_that_is_open() -> None:
    gpus = [replace(H100, index=n, uuid=f"GPU-{n}") for n in (2, 5)]
    job = replace(context(), num_ranks=2, meeting=Meeting("127.0.0.1", 4711, 9))
    first, second = plan_training(gpu_places(gpus), job)
    for rank, spec in enumerate((first, second)):
        assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-5"
        assert spec.env["MODEL_CHECK_GPU_UUID"] == f"GPU-{(2, 5)[rank]}"
        place = [spec.env[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        assert place == [str(rank), str(rank), "2"]
        assert (spec.env["MASTER_ADDR"], spec.env["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert (first.env[STORE_FD], first.inherited_fds) == ("9", (9,))
    assert (second.env[STORE_FD], second.inherited_fds) == ("", ())
    assert plan_prepare(job).env["WORLD_SIZE"] == "2"


def test_isolated_workers_do_not_inherit_a_rank() -> None:
    of_a_job = dict.fromkeys(RANK_VARIABLES, "1")
    for spec in (
        *plan_training(cpu_places(2), context(**of_a_job)),
        plan_prepare(context(**of_a_job)),
    ):
        assert not of_a_job.keys() & spec.env.keys()
    (command,) = plan_command(cpu_places(1), ["tool"], context(**of_a_job))
    assert of_a_job.items() <= command.env.items()


def test_a_worker_compiles_with_its_share_of_the_cores_and_grows_its_segments() -> None:
    (one, *_) = plan_training(gpu_places([H100]), context())
    share = one.env["OMP_NUM_THREADS"]
    assert one.env["TORCHINDUCTOR_COMPILE_THREADS"] == share
    assert one.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    theirs = context(PYTORCH_ALLOC_CONF="max_split_size_mb:64", TORCHINDUCTOR_COMPILE_THREADS="2")
    (own, *_) = plan_training(gpu_places([H100]), theirs)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own.env
    assert own.env["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in plan_training(cpu_places(1), context())[0].env
