"""What a worker keeps as evidence, by its settings."""

from collections.abc import Callable

from model_check.forensics.manifest import read_manifest
from model_check.hooks.evidence import EvidenceWriter
from tests.engine.conftest import Run

GUILTY = "weights/norm.weight"


def test_statistics_alone_are_kept_where_nothing_else_may_be(tiny_run: Callable[..., Run]) -> None:
    state = tiny_run().trainer.state
    EvidenceWriter(state.model, state.optimizer, state.context, 0).dossier(
        "difference", 1, step=1, guilty=[GUILTY]
    )
    found = read_manifest(state.context.dossier)
    assert (found.tensors, found.bytes) == ({}, 0)
    assert found.left_out[GUILTY].statistics.norm > 0
