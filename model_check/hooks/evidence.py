"""Saves what explains a failure: files that people read about, and the dossier of a worker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from model_check.engine.checkpoint import set_earlier_aside, storing, write_checkpoint
from model_check.engine.run_context import RunContext
from model_check.errors import StorageError
from model_check.events import Break, Evidence, NonFinite
from model_check.forensics.dossier import write_dossier
from model_check.forensics.manifest import MANIFEST
from model_check.forensics.optimizer import Optimizer, tensors_of


@dataclass(frozen=True)
class EvidenceWriter:
    """A full disk, or a GPU that fails for good, must not hide a finding: each method returns a
    line that says what became of its file."""

    model: nn.Module
    optimizer: Optimizer
    context: RunContext
    dossier_bytes: int
    """How much of its tensors a dossier may keep."""

    def file(self, what: str, path: Path, write: Callable[[Path], object]) -> str:
        """Writes a file; an earlier one of that name is set aside."""

        def write_beside(path: Path) -> None:
            set_earlier_aside(path)
            write(path)

        return self._keep(what, path, write_beside)

    def shards(self, num_done: int) -> str:
        """Writes what lies on this rank of the state after `num_done` steps: each tensor by its
        place in the whole, `weights/norm.weight[256:512]`."""
        world, tensors = self.context.world, dict(tensors_of(self.model, self.optimizer))
        kept = {name: t for name, t in tensors.items() if not name.startswith("gradients/")}
        about = {"rank": world.rank, "num_ranks": world.size, "step": num_done}
        return self.file(
            "Shards of this rank",
            self.context.evidence / f"nan_grad_step_{num_done}.shards.pt",
            lambda path: write_checkpoint(path, {**about, "shards": kept}),
        )

    def dossier(
        self,
        kind: Literal["nonfinite", "difference", "break"],
        state_after: int,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        step: int,
        guilty: Sequence[str],
        event: NonFinite | Break | None = None,
    ) -> str:
        """Writes the dossier. `state_after`: optimizer steps that made weights and moments.
        `tensors`: by their names in a dossier, any shape; None: the state. `step`: of the fault.
        `guilty`: the names of suspect tensors."""
        identity = self.context.identity
        about: dict[str, Any] = {
            "worker": identity.worker,
            "run": identity.run_name,
            "kind": kind,
            "step": step,
            "state_after": state_after,
            "event": {} if event is None else msgspec.to_builtins(event),
        }
        kept: Iterable[tuple[str, Tensor]] = tensors_of(self.model, self.optimizer)
        if tensors is not None:
            kept = tensors.items()

        def write(path: Path) -> None:
            write_dossier(path.parent, about, kept, guilty=guilty, most_bytes=self.dossier_bytes)

        return self._keep("Dossier", self.context.dossier / MANIFEST, write)

    def _keep(self, what: str, path: Path, write: Callable[[Path], object]) -> str:
        context = self.context
        is_in_run = context.run_dir in path.parents
        try:
            with storing(path, "--run-dir" if is_in_run else "system.checkpoint_dir"):
                if not is_in_run:
                    context.claim.check()
                write(path)
        except (StorageError, torch.AcceleratorError, MemoryError) as error:
            return f"{what} not saved: {error}"
        context.channels.sink.emit(Evidence(path=str(path.absolute()), what=what.lower()))
        return f"{what} saved: {path}"
