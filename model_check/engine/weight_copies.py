"""The trial of bf16 copies, which a step casts once: before a run takes them, its steps must be
what they are where autocast casts the weights."""

from dataclasses import replace
from functools import partial

import torch

from model_check.config.derived import num_micro_batches
from model_check.engine.compile import check_steps, digest_of_step, random_steps
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.engine.uncompiled import uncompiled
from model_check.errors import PeerLost
from model_check.utils.words import first_line


def take_copies(state: TrainingState, plan: StepPlan) -> StepPlan:
    """`plan` with copies of the matrices, where they pass on all ranks; else as it is, and a line
    says why. Leaves weights, gradients and random states as they were."""
    context, fast = state.context, replace(plan, copies_of=state.model)
    with kept_rng():
        obstacles = context.world.gathered(_obstacle(state, fast, plan))
    state.optimizer.zero_grad()
    if found := next(filter(None, obstacles), None):
        text = "training.bf16_copies = true: not taken, autocast casts the weights"
        context.channels.note(f"{text}: {found}")
        return plan
    return fast


def _obstacle(state: TrainingState, fast: StepPlan, plain: StepPlan) -> str | None:
    # A second micro-batch takes the copies of the first.
    num_batches = min(2, num_micro_batches(state.settings, plain.world.size))
    try:
        with uncompiled(state.model):
            return check_steps(
                partial(digest_of_step, state, fast),
                partial(digest_of_step, state, plain),
                random_steps(state.settings, state.shape.vocab_size, plain.device, num_batches),
                plain.dtype,
                "autocast",
            )
    except (torch.OutOfMemoryError, torch.AcceleratorError, PeerLost):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
