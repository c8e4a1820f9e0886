"""A run's part of a job on several nodes: it joins the others, learns its ranks, and leaves with
them. A run on one node has none of it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launcher import run_dir
from launcher.launch import Launch
from launcher.nodes.job import join_nodes, open_meeting
from launcher.output.printer import Printer
from launcher.plan import Meeting
from launcher.supervise.outcome import Outcome
from launcher.verdict.record import RunRecord
from model_check.config.load import to_json
from model_check.config.ranks import check_ranks, rank_timeout_s
from model_check.config.resume import AUTO
from model_check.errors import EXIT_INTERNAL, CheckpointError, ModelCheckError
from model_check.utils.secrets import masked
from model_check.utils.words import first_line

if TYPE_CHECKING:
    from launcher.nodes.nodes import Nodes


class Part:
    """From the meeting of the launchers to their end."""

    def __init__(self, launch: Launch, printer: Printer) -> None:
        self._launch, self._printer = launch, printer
        self.nodes: Nodes | None = None
        """None: this run is on one node, or has not joined the others."""

    def join(self, launch: Launch, record: RunRecord) -> tuple[Launch, RunRecord]:
        """The same, and what the meeting tells of them. Raises ModelCheckError."""
        if launch.nodes is None:
            return launch, record
        self._printer.say("waiting for the launchers of the other nodes ...")
        part = run_dir.part_name(launch.context.run_dir)
        nodes = join_nodes(
            launch.nodes,
            launch.loaded.settings,
            record.groups,
            record.versions["torch"],
            launch.context.environ,
            launch.node_silence_s,
            part,
        )
        patience_s = rank_timeout_s(launch.loaded.settings.launch, True, None)
        nodes.open(min(patience_s, launch.limits.stop_at - time.monotonic()))
        launch.absence.end()
        self.nodes = nodes
        node, resume = nodes.meet()
        check_ranks(launch.loaded.settings, node.num_ranks)
        first_rank = min(node.ranks.values())
        context = replace(launch.context, first_rank=first_rank, num_ranks=node.num_ranks)
        launch = replace(launch, context=context)
        record = replace(record, part=node)
        ranks = ", ".join(f"{name} is rank {rank}" for name, rank in node.ranks.items())
        self._printer.say(f"all {len(node.hosts)} nodes are here: on {node.name}, {ranks}")
        if part and not nodes.is_first:
            launch = self._as_the_first(launch, resume)
        return launch, record

    def _as_the_first(self, launch: Launch, resume: str | None) -> Launch:
        """The first node has chosen where the job goes on. Raises CheckpointError where this one
        does not see it."""
        assert launch.nodes is not None
        first = launch.nodes.names[0]
        self._printer.say(f"{first} has chosen: {_where(resume)}")
        if resume not in (None, AUTO) and not os.path.exists(resume):
            raise CheckpointError(
                f"this node does not see {resume}, from which {first} goes on: "
                "system.checkpoint_dir must be on a file system that all nodes share, under one "
                "path; with a copy of it there, `--resume auto` goes on"
            )
        launch = resumed_from(launch, resume)
        run_dir.write(launch.context.run_dir / "config.json", to_json(launch.loaded.settings))
        return launch

    @contextmanager
    def open_meeting(self, data: str) -> Iterator[Meeting]:
        """Where the ranks find each other; of several nodes on the first. `data`: equal where nodes
        train on the same. Raises ModelCheckError."""
        nodes = self.nodes
        if nodes is None:
            with open_meeting() as meeting:
                yield meeting
        elif nodes.is_first:
            with open_meeting(nodes.address) as meeting:
                nodes.begin(data, meeting.port)
                yield meeting
        else:
            yield Meeting(nodes.address, nodes.begin(data, 0), None)

    def concluded(self, outcome: Outcome) -> Outcome:
        """How the job ended, as all nodes know it."""
        if self.nodes is None:
            return outcome
        outcome = replace(outcome, end=self.nodes.concluded(outcome.end))
        if self.nodes.fault is not None:
            for line in self.nodes.fault.splitlines():
                self._printer.say(line)
        return outcome

    def agreement(self, record: RunRecord) -> RunRecord:
        """Of the nodes, which the first one has compared."""
        if self.nodes is None or record.part is None:
            return record
        return replace(record, part=replace(record.part, agreed_steps=self.nodes.agreed_steps))

    def leave(self, why: str, exit_code: int, *, goes_on: bool) -> bool:
        """When the others are done, too. Whether all nodes would try again."""
        if self.nodes is not None:
            return self.nodes.leave(goes_on=goes_on)
        # It was refused before it could join.
        self._launch.absence.tell(masked(why), exit_code, self._printer.say)
        return goes_on

    def break_off(self, error: BaseException) -> None:
        """The run ends by an exception; who has not joined yet tells it when that is printed."""
        if self.nodes is not None:
            self.nodes.break_off(*reason(error))


def reason(error: BaseException) -> tuple[str, int]:
    """Why this launcher leaves, in a line for the other nodes, and its exit code. Masked here: they
    do not know the secrets of this environment."""
    why = masked(first_line(error))
    if isinstance(error, ModelCheckError):
        return why, error.exit_code
    fault = f"{type(error).__name__}: {why}"
    return f"a fault of Model Check itself: {fault}", EXIT_INTERNAL


def resumed_from(launch: Launch, resume: str | None) -> Launch:
    settings = launch.loaded.settings
    training = replace(settings.training, resume=resume)
    loaded = replace(launch.loaded, settings=replace(settings, training=training))
    return replace(launch, loaded=loaded)


def _where(resume: str | None) -> str:
    if resume is None:
        return "the job begins again"
    return f"the job goes on from {Path(resume)}" if resume != AUTO else "the job begins as it did"
