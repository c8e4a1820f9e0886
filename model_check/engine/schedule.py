"""The learning rate of each step. Pure."""

import math

from model_check.config.schema import TrainingSettings


def learning_rate(step: int, training: TrainingSettings) -> float:
    """The rate of optimizer step `step` (from 0). Never below min_lr, which is reached at
    max_steps."""
    if step < training.warmup_steps:
        rate = training.learning_rate * (step + 1) / training.warmup_steps
    else:
        span = training.learning_rate - training.min_lr
        rate = training.min_lr + span * _remaining(step, training)
    return max(rate, training.min_lr)


def _remaining(step: int, training: TrainingSettings) -> float:
    """1 at the end of the warm-up, 0 at max_steps and after."""
    num_decaying = max(1, training.max_steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / num_decaying)
    match training.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            return _stable_then_falling(step, training)


def _stable_then_falling(step: int, training: TrainingSettings) -> float:
    """WSD (Hu et al. 2024, MiniCPM, section 4.2). The linear decay begins after the warm-up at the
    earliest."""
    share = round(training.wsd_decay_share * training.max_steps)
    num_falling = max(1, min(share, training.max_steps - training.warmup_steps))
    return min(1.0, max(0.0, (training.max_steps - step) / num_falling))
