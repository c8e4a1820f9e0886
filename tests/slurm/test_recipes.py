"""The scripts of examples/slurm, as they are, run by Slurm itself on nodes without GPUs: two CPU
workers each, and drills."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S
from tests.nvml_fake.build import build, fake_gpu, scenario
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "slurm"
LIMIT_S = 15
"""Of a prolog."""
OWN = "/etc/slurm/own"
TINY = {
    "model": {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    "training": {"max_steps": 4, "batch_size": 2, "context_length": 32, "use_amp": False},
    "data": {"dataset": "embedded", "bpe_vocab_size": 512, "num_samples": 64},
    "launch": {"replay_s": 0},
}
FLIP = "flip@2:CPU1"
WEIGHT = "layers.0.feed_forward.w2.weight"
HANG = "hang@2:CPU1"
NAN = "nan@2:CPU1"


@dataclass(frozen=True)
class Site:
    """A cluster, and what its administrator decides: /etc/slurm/model-check.sh."""

    cluster: Cluster
    directory: Path
    token_cache: Path

    @property
    def reports(self) -> Path:
        return self.directory / "reports"

    def write(self, *lines: str) -> None:
        """The example's lines, then those of a site without GPUs, then `lines`."""
        ours = (
            f"MODEL_CHECK={ROOT}",
            "MODEL_CHECK_GPUS=",
            f"MODEL_CHECK_DEADLINE={DEADLINE_S}",
            f"MODEL_CHECK_SPOOL={self.directory}/spool",
            f"MODEL_CHECK_REPORTS={self.reports}",
            f"MODEL_CHECK_OPTIONS=(--workers 2 --config {OWN}/settings.json)",
            f"export MODEL_CHECK_PYTHON={sys.executable} MODEL_CHECK_HISTORY_FILE=",
            f"export DATASET_CACHE_DIR={self.token_cache}",
        )
        text = "\n".join([(RECIPES / "model-check.sh").read_text(), *ours, *lines, ""])
        (self.cluster.directory / "model-check.sh").write_text(text)

    def drill(self, node: str, drill: str | None) -> None:
        """The settings that this node's runs have."""
        settings = TINY | ({"debug": {"drill": drill}} if drill else {})
        (self.cluster.directory / node / "settings.json").write_text(json.dumps(settings))

    def report(self, run: str, node: str) -> dict[str, object]:
        text = (self.reports / run / node / "report.json").read_text()
        found: dict[str, object] = json.loads(text)
        return found


@pytest.fixture
def site(cluster: Cluster, token_cache: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(cluster, tmp_path, token_cache)
    for node in cluster.nodes:
        site.drill(node.name, None)
    site.write()
    yield site
    cluster.recover()


def test_a_prolog_is_over_in_time_and_drains_the_node_with_a_fault(site: Site) -> None:
    """A worker of n1 hangs: the deadline ends that. A bit flips on n2."""
    cluster, out = site.cluster, site.directory / "out"
    site.drill("n1", HANG)
    site.drill("n2", FLIP)
    site.write(
        "if [[ $SLURMD_NODENAME == n1 && $SLURM_SCRIPT_CONTEXT == prolog_slurmd ]]; then",
        f"MODEL_CHECK_DEADLINE={LIMIT_S}",
        f"trap 'echo $SECONDS > {site.directory}/took' EXIT",
        "fi",
    )
    scripts = {"Prolog": RECIPES / "prolog.sh", "Epilog": RECIPES / "epilog.sh"}
    with cluster.configured(**scripts, PrologFlags="Alloc", BatchStartTimeout=DEADLINE_S):
        submit = ("sbatch", "--parsable", "--wrap", f"hostname >> {out}", "-o", "/dev/null")
        well = cluster.told(*submit, "-w", "n1")
        ill = cluster.told(*submit, "-w", "n2")
        cluster.wait_for("a job on n1", out.exists, DEADLINE_S)
        cluster.wait_for_state("n2", "drained", deadline_s=DEADLINE_S)
        kept = site.reports / f"{ill}.0" / "n2" / "report.json"
        cluster.wait_for("what the epilog keeps", kept.exists, DEADLINE_S)
        assert cluster.told("squeue", "--noheader", "--jobs", ill, "--format", "%T") == "PENDING"
        reason = cluster.reason("n2")
        assert reason.startswith(f"model_check: SUSPECT: CPU1: {WEIGHT} changed"), reason
        assert out.read_text() == "n1\n"
    # The limit ended it, no hang; a shell that reads whole seconds and a busy machine take some.
    assert int((site.directory / "took").read_text()) <= 2 * LIMIT_S
    assert site.report(f"{well}.0", "n1")["verdict"] == "INCONCLUSIVE"
    assert site.report(f"{ill}.0", "n2")["verdict"] == "SUSPECT"
    assert list((kept.parent / "dossier").iterdir())
    assert not list((site.directory / "spool").iterdir())


def test_a_health_check_drains_the_node_that_lost_a_gpu(site: Site) -> None:
    cluster = site.cluster
    library = build(site.directory)
    site.write(
        f"export LD_LIBRARY_PATH={library} NVML_FAKE_SCENARIO={OWN}/gpus",
        "MODEL_CHECK_GPUS=2",
    )

    def has_gpus(node: str, count: int) -> None:
        gpus = [fake_gpu(number) for number in range(count)]
        (cluster.directory / node / "gpus").write_text(scenario(gpus))

    has_gpus("n1", 2)
    has_gpus("n2", 1)
    with cluster.configured(HealthCheckProgram=RECIPES / "health.sh", HealthCheckInterval=1):
        cluster.wait_for_state("n2", "drained")
        assert cluster.reason("n2").startswith(
            "model_check: FAIL: visible GPUs: launch.expect_gpus = 2, found 1: 0"
        )
        assert cluster.state("n1") == "idle"
        has_gpus("n2", 2)  # the check may run once more


def test_one_job_checks_every_node_and_names_the_one_with_a_fault(site: Site) -> None:
    cluster = site.cluster
    site.drill("n2", NAN)
    done = cluster.run(
        *("sbatch", "--wait", "--parsable", "--nodes=2", "--chdir", site.directory),
        *(RECIPES / "fleet.sbatch", "--workers=2", "--config", f"{OWN}/settings.json"),
        deadline_s=DEADLINE_S,
    )
    job = done.stdout.split()[0]
    said = (site.directory / f"model-check-{job}.out").read_text()
    assert done.returncode == 20, said
    fleet = site.directory / f"model-check-{job}"
    (found,) = json.loads((fleet / "fleet.json").read_text())["findings"]
    named = [found[key] for key in ("node", "worker", "verdict", "severity")]
    assert named == ["n2", "CPU1", "FAIL", "ISOLATE"]

    commands = subprocess.run(
        (sys.executable, "-m", "launcher", "report", fleet, "--drain"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    cluster.told("bash", "-c", commands)
    assert cluster.state("n1") == "idle"
    assert cluster.state("n2") == "drained"
    assert cluster.reason("n2").startswith(f"model_check: DRILL {NAN}: CPU1 FAIL ISOLATE: ")
