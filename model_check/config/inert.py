"""Which settings do nothing under which others. Pure, but that it looks whether a path is text that
lies here."""

import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from model_check.config.attention import KINDS, OF_KINDS, names_with
from model_check.config.fields import all_fields, given_by, setting_text, value_of
from model_check.config.places import FALLBACK
from model_check.config.ranks import JOBS
from model_check.config.schema import FsdpSettings, Settings
from model_check.errors import ConfigError

T = TypeVar("T", bound=Struct)

CHECKPOINT = "checkpoint "
"""With its path: the source of what --resume takes from it."""


def nobody_gave(source: str) -> bool:
    """Whether no person gave a value of that source; a settings file may have any name."""
    of_ours = source.startswith(("preset ", CHECKPOINT))
    return of_ours or source in ("default", FALLBACK)


class Rule(NamedTuple):
    """`names` do something only where `acts` holds, which the settings `by` decide."""

    names: tuple[str, ...]
    by: tuple[str, ...]
    acts: Callable[[Settings], bool]
    needs: str


_SAVING = tuple(f"training.save_{when}" for when in ("interval", "last", "best", "on_signal"))


def _saves(settings: Settings) -> bool:
    training = settings.training
    on_demand = training.save_last or training.save_best or training.save_on_signal
    return on_demand or training.save_interval is not None


def _is_from_hub(settings: Settings) -> bool:
    name = settings.data.dataset
    return name != "embedded" and not os.path.exists(os.path.expanduser(name))


def _accumulates(settings: Settings) -> bool:
    training = settings.training
    given = (training.global_batch_size, training.global_grad_accum_nums)
    return training.grad_accum_nums > 1 or any(total is not None for total in given)


def _acts_with_some_kinds(name: str) -> Rule:
    """Of a setting that not every kind of attention has."""
    return Rule(
        (name,),
        ("model.attention",),
        lambda s: name in KINDS[s.model.attention].settings,
        f"model.attention={' or '.join(names_with(name))}",
    )


_OWN_END = ("bpe", "wordpiece", "midi", "tiktoken")
RULES = (
    Rule(
        ("training.min_lr",),
        ("training.lr_schedule",),
        lambda s: s.training.lr_schedule != "constant",
        "training.lr_schedule=cosine, linear or wsd",
    ),
    Rule(
        ("training.wsd_decay_share",),
        ("training.lr_schedule",),
        lambda s: s.training.lr_schedule == "wsd",
        "training.lr_schedule=wsd",
    ),
    Rule(
        ("training.keep_last",),
        ("training.save_interval",),
        lambda s: s.training.save_interval is not None,
        "training.save_interval",
    ),
    Rule(
        ("training.save_best", "training.eval_batches", "training.best_split"),
        ("training.eval_interval",),
        lambda s: s.training.eval_interval is not None,
        "training.eval_interval",
    ),
    Rule(
        ("training.sample_prompts", "training.sample_length"),
        ("training.sample_interval",),
        lambda s: s.training.sample_interval is not None,
        "training.sample_interval",
    ),
    Rule(
        ("training.async_save",),
        _SAVING,
        _saves,
        "training.save_interval, save_last, save_best or save_on_signal",
    ),
    Rule(
        ("training.resume_anyway",),
        ("training.resume",),
        lambda s: s.training.resume is not None,
        "training.resume",
    ),
    Rule(
        ("model.init_std",),
        ("model.init_from",),
        lambda s: s.model.init_from is None,
        "random weights (model.init_from=null)",
    ),
    *(_acts_with_some_kinds(name) for name in OF_KINDS),
    Rule(
        ("data.bpe_vocab_size",),
        ("data.tokenizer",),
        lambda s: s.data.tokenizer in ("auto", "bpe", "wordpiece"),
        "data.tokenizer=bpe or wordpiece",
    ),
    Rule(
        ("data.dataset_config", "data.split"),
        ("data.dataset",),
        _is_from_hub,
        "a dataset of the hub (data.dataset)",
    ),
    Rule(
        ("data.text_column",),
        ("data.dataset", "training.stage"),
        lambda s: s.data.dataset != "embedded" and s.training.stage == "next_token",
        "a data.dataset of rows, not embedded, and training.stage=next_token",
    ),
    Rule(
        ("data.stride", "data.tail"),
        ("training.stage",),
        lambda s: s.training.stage == "next_token",
        "training.stage=next_token: examples are not cut into windows",
    ),
    Rule(
        ("data.document_end",),
        ("data.tokenizer",),
        lambda s: s.data.tokenizer.partition(":")[0] not in _OWN_END,
        "a data.tokenizer of a model or a file: others have an end token of their own",
    ),
    Rule(
        ("data.truncation", "data.chat_template"),
        ("training.stage",),
        lambda s: s.training.stage == "prompt_target",
        "training.stage=prompt_target",
    ),
    Rule(
        ("logging.wandb_project",),
        ("logging.wandb",),
        lambda s: s.logging.wandb != "off",
        "logging.wandb=online or offline",
    ),
    Rule(
        ("system.device_id",),
        ("system.device",),
        lambda s: s.system.device != "cpu",
        "system.device=cuda",
    ),
    Rule(
        ("launch.max_restarts",),
        ("launch.mode",),
        lambda s: s.launch.mode in JOBS,
        "launch.mode=ddp or fsdp",
    ),
    Rule(
        tuple(f"launch.fsdp.{name}" for name in FsdpSettings.__struct_fields__),
        ("launch.mode",),
        lambda s: s.launch.mode == "fsdp",
        "launch.mode=fsdp",
    ),
    Rule(
        ("launch.fsdp.sync_micro_batches",),
        ("training.grad_accum_nums", "training.global_batch_size"),
        _accumulates,
        "several micro-batches in a step (training.grad_accum_nums)",
    ),
    Rule(
        ("launch.seeds", "launch.replicas"),
        ("launch.mode",),
        lambda s: s.launch.mode == "compare",
        "launch.mode=compare",
    ),
    Rule(
        ("launch.audit_interval",),
        ("launch.mode", "system.deterministic"),
        lambda s: s.launch.mode == "ddp" and s.system.deterministic,
        "launch.mode=ddp and system.deterministic=true",
    ),
    Rule(
        ("launch.max_lead", "launch.replay_s"),
        ("system.deterministic",),
        lambda s: s.system.deterministic or s.launch.replay_s == 0,
        "system.deterministic=true",
    ),
)
"""Left out are limits that are never reached, and what describes a model or a place."""


def check_acts(
    settings: Settings,
    sources: Mapping[str, str],
    file: str | None,
    arm: Container[str] | None = None,
) -> dict[str, str]:
    """Raises ConfigError for a setting that a person gave and that does nothing. One that repeats
    the default asks for nothing. A line by its name for each that stands in the settings file and
    does nothing because of what was said over that file; and where this is an arm of a comparison,
    which gives the settings `arm` itself, for each that all arms were given."""
    lines = {}
    for rule in RULES:
        for name in _inert(rule, settings):
            source = sources.get(name, "settings")
            if nobody_gave(source):
                continue
            value = setting_text(value_of(settings, name))
            given = f"{given_by(source, name)}{name} = {value}"
            over = {sources[other] for other in rule.by} - {file}
            is_below = source == file and not all(map(nobody_gave, over))
            if not is_below and (arm is None or name in arm):
                raise ConfigError(f"{given}: needs {rule.needs}")
            lines[name] = f"{given} changes nothing here: it needs {rule.needs}"
    return lines


def acting(settings: Settings) -> Settings:
    """With the default for each setting that does nothing, as a preset may leave them."""
    for rule in RULES:
        for name in _inert(rule, settings):
            settings = with_value(settings, name.split("."), all_fields()[name].default)
    return settings


def with_value(tree: T, path: Sequence[str], value: Any) -> T:
    """`tree` with another value at `path`."""
    key, *rest = path
    inner = with_value(getattr(tree, key), rest, value) if rest else value
    return replace(tree, **{key: inner})


def _inert(rule: Rule, settings: Settings) -> list[str]:
    if rule.acts(settings):
        return []
    return [n for n in rule.names if value_of(settings, n) != all_fields()[n].default]
