"""A replay computes the steps of an earlier run again, and nothing beside them. Pure."""

from msgspec.structs import replace

from model_check.config.drill import Drill
from model_check.config.schema import Settings
from model_check.errors import ConfigError


def replayed(settings: Settings) -> Settings:
    """The settings of the replay of such a run: no evaluation, no sample, no
    checkpoint, no log elsewhere."""
    training = replace(
        settings.training,
        eval_interval=None,
        sample_interval=None,
        save_interval=None,
        save_last=False,
        save_best=False,
        save_on_signal=False,
    )
    logging = replace(settings.logging, tensorboard=False, tensorboard_dir=None, wandb="off")
    debug = replace(settings.debug, profile_steps=None, dump_tensors=False)
    return replace(settings, training=training, logging=logging, debug=debug)


def replayed_drill(drill: Drill | None) -> Drill | None:
    """What of a drill acts in a replay, and after a restart: a fault that comes once has come."""
    return drill if drill is not None and drill.always else None


def check_replay(step: int, settings: Settings) -> None:
    """Raises ConfigError for a step that the run never reaches."""
    if not 0 <= step < settings.training.max_steps:
        raise ConfigError(
            f"--replay-to {step}: the steps of this run are 0 to {settings.training.max_steps - 1}"
        )
