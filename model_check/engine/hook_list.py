"""The hooks of a run, in one list: all that a run does beside training."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from model_check.config.schema import Settings
from model_check.engine.saving.saver import Saver
from model_check.engine.state import TrainingState
from model_check.events import Dump
from model_check.forensics.advice import advice
from model_check.forensics.fingerprint import Fingerprint
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums, DeterminismCheck, StateCheck
from model_check.hooks.evaluate import Evaluate
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.fingerprints import Fingerprints
from model_check.hooks.hook import Hook
from model_check.hooks.inject import Injector
from model_check.hooks.lockstep import Lockstep, SupervisorClient
from model_check.hooks.nonfinite import NonFiniteHandler
from model_check.hooks.progress import Progress
from model_check.hooks.sample import MakeSamples
from model_check.hooks.save import Save
from model_check.hooks.site_monitor import SiteMonitor
from model_check.train import StepContext, accumulate, audit, repeat


@dataclass(frozen=True)
class Checks:
    """What looks into each step."""

    monitor: SiteMonitor
    fingerprints: Fingerprints
    log: ChecksumLog


@dataclass(frozen=True)
class Hooks:
    """The list, and those of it that other parts ask."""

    in_order: Sequence[Hook]
    injector: Injector
    nonfinite: NonFiniteHandler
    saver: Saver
    client: SupervisorClient


def make_hooks(
    state: TrainingState,
    step_context: StepContext,
    checks: Checks,
    kernel: Fingerprint,
    lag: int,
) -> Hooks:
    """The hooks of a run. Their order is that in which they hear of a step:

    - the determinism check computes the first step before a fault is injected
    - state that changed by itself may be why a step is not finite: checksums come first
    - behind the search for NaN all hooks see finite steps only: they count, and the log tells them
    - a step is told before the run ends of what it found: the state check is behind the log
    - evaluation before samples, and both before a checkpoint, which knows the best loss
    - the wait for the supervisor's permit is last: behind it the next step begins
    """
    settings, context, log = state.settings, state.context, checks.log
    model, optimizer = state.model, state.optimizer
    evidence = EvidenceWriter(model, optimizer, context, _dossier_bytes(settings))
    client = _supervisor_client(state, log, evidence)
    injector = Injector(context.drill, context.identity.worker, model, optimizer, context.world)
    nonfinite = _nonfinite_handler(state, step_context, checks, injector, evidence, lag)
    found_by = (checks.fingerprints, log, nonfinite, evidence, client, context)
    state_check = StateCheck(model, optimizer, *found_by, num_steps=state.num_steps)
    progress = Progress(context)
    saver = Saver(settings.training, state, kernel)
    save = Save(state, saver, evidence, client, state_check.check_now)
    keeps_step = 0 < lag < settings.launch.max_lead
    in_order: list[Hook] = [
        _determinism_check(state, step_context, checks),
        injector,
        _checksums(state, step_context, checks, state_check),
        nonfinite,
        progress,
        *state.observers,
        state_check,
        Evaluate(state, step_context, save, client),
        MakeSamples(state, context.prompts, client),
        save,
        Lockstep(client, progress.start_timing, num_steps=state.num_steps, keeps_step=keeps_step),
    ]
    return Hooks(in_order, injector, nonfinite, saver, client)


def _dossier_bytes(settings: Settings) -> int:
    return int(settings.launch.dossier_gib * 2**30)


def _nonfinite_handler(
    state: TrainingState,
    step_context: StepContext,
    checks: Checks,
    injector: Injector,
    evidence: EvidenceWriter,
    lag: int,
) -> NonFiniteHandler:
    return NonFiniteHandler(
        state.model,
        state.optimizer,
        state.context,
        partial(repeat, step_context),
        checks.monitor,
        injector,
        evidence,
        lag=lag,
        proves=checks.fingerprints.see_all,
        capture=state.capture,
        advise=partial(_advice, state),
        dumps_tensors=state.settings.debug.dump_tensors,
    )


def _advice(state: TrainingState) -> str:
    is_fresh = state.settings.model.init_from is None and state.progress.resumed is None
    return advice(state.settings, is_fresh=is_fresh)


def _determinism_check(
    state: TrainingState, step_context: StepContext, checks: Checks
) -> DeterminismCheck:
    return DeterminismCheck(
        partial(accumulate, step_context),
        checks.fingerprints,
        checks.log,
        state.context.world,
        is_deterministic=state.settings.system.deterministic,
        loss_scale=state.optimizer.loss_scale,
    )


def _checksums(
    state: TrainingState, step_context: StepContext, checks: Checks, state_check: StateCheck
) -> Checksums:
    is_alone, interval = state.context.world.is_alone, state.settings.launch.audit_interval
    compute_audit = None if is_alone else partial(audit, step_context)
    return Checksums(checks.fingerprints, checks.log, state_check, compute_audit, interval)


def _supervisor_client(
    state: TrainingState, log: ChecksumLog, evidence: EvidenceWriter
) -> SupervisorClient:
    """It answers from `log`; `evidence` saves what it is to keep."""
    channels, stop = state.context.channels, state.context.stop

    def keep(dump: Dump, num_done: int) -> None:
        kept = evidence.dossier("difference", num_done, step=dump.of_step, guilty=dump.tensors)
        channels.say_own(kept)

    on_notice = state.settings.training.save_on_signal
    return SupervisorClient(channels.sink, stop, on_notice=on_notice, answer=log.vectors, keep=keep)
