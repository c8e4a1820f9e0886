"""Settings for people: the reference page (config/README.md) and `config show`.

`python -m model_check.config.describe` prints the page; a test holds config/README.md against it.
"""

import json
from typing import Any

from model_check.config.aliases import ABSENT, ALIASES, UNNEEDED, VALUES
from model_check.config.derived import failing_severities, num_micro_batches, precision
from model_check.config.fields import Field, all_fields, sections, setting_text, value_of
from model_check.config.load import ENVIRONMENT, Loaded, preset_names
from model_check.config.memory import describe_size
from model_check.config.schema import Settings

_HEAD = f"""# Settings

This page is made from the code: `python -m model_check.config.describe > config/README.md`.

Sources, each over the ones before it: defaults < preset ({", ".join(preset_names())}) <
`--config FILE` < environment < `section.key=value` < option. Files are JSON (comments and trailing
commas allowed), YAML or TOML, by their suffix, and may be partial. An unknown name is an error that
shows the nearest one; a value of the wrong type is an error, too. `bash run.sh config show` prints
every value and where it came from.

On the command line and in a file a name may lack its section where it is clear without
(`max_steps=5`), and it is an option, too (`--max-steps 5`, `--max_steps=5`; a switch such as
`--compile` needs no value). Two names of one setting in one source are an error. A `batch_size`
beside a `micro_batch_size` is the batch of an optimizer step: `training.global_batch_size`.

A preset's `on_cpu` section is laid over it where no GPU is used.
"""


def reference_page() -> str:
    """The whole of config/README.md."""
    parts = [_HEAD]
    for name, struct in sections().items():
        parts.append(f"\n## {name}\n\n{(struct.__doc__ or '').strip()}\n\n{_table(name)}")
    parts.append("\n## Environment\n\n| variable | sets |\n|---|---|\n")
    parts += [f"| `{variable}` | `{name}` |\n" for variable, name in ENVIRONMENT.items()]
    parts.append("\n## Other names that are understood\n\n| name | means |\n|---|---|\n")
    parts += [f"| `{alias}` | `{name}` |\n" for alias, name in sorted(ALIASES.items())]
    parts += [_word(name, word) for name, words in VALUES.items() for word in words]
    parts.append("\nThese change nothing, and a line says why:\n\n| name | why |\n|---|---|\n")
    parts += [f"| `{name}` | {row.why} |\n" for name, row in UNNEEDED.items()]
    parts.append("\nThese are refused:\n\n| name | why |\n|---|---|\n")
    parts += [f"| `{name}` | {what} |\n" for name, what in ABSENT.items()]
    return "".join(parts)


def show(loaded: Loaded, *, as_json: bool = False) -> str:
    """Every setting with its value and its source, one a line, and the size of the model."""
    values = {name: loaded.value(name) for name in loaded.sources}
    replaced = _replaced(loaded.settings)
    values |= {name: value for name, (value, _) in replaced.items()}
    sources = {**loaded.sources, **{name: source for name, (_, source) in replaced.items()}}
    if as_json:
        rows = {n: {"value": v, "source": sources[n]} for n, v in values.items()}
        document = {"schema": 1, "kind": "settings", "preset": loaded.preset, "settings": rows}
        return json.dumps(document, indent=2)
    width = max(len(name) for name in values)
    texts = {name: json.dumps(value) for name, value in values.items()}
    value_width = min(40, max(len(text) for text in texts.values()))
    lines = [
        f"{name:<{width}}  {text:<{value_width}}  {sources[name]}" for name, text in texts.items()
    ]
    return "\n".join([*lines, f"model: {describe_size(loaded.settings, loaded.device)}"])


def _replaced(settings: Settings) -> dict[str, tuple[Any, str]]:
    """Name -> what acts and where it is from, of each setting that another one replaces."""
    training, launch = settings.training, settings.launch
    found: dict[str, tuple[Any, str]] = {}
    for key in ("global_batch_size", "global_grad_accum_nums"):
        if getattr(training, key) is not None:
            follows = f"follows training.{key}"
            found["training.grad_accum_nums"] = num_micro_batches(settings), follows
    if training.precision is not None:
        is_half = precision(training) != "fp32"
        found["training.use_amp"] = is_half, "follows training.precision"
    if launch.fail_on_health:
        found["launch.fail_on"] = failing_severities(launch), "follows launch.fail_on_health"
    return {name: row for name, row in found.items() if row[0] != value_of(settings, name)}


def _word(name: str, word: str) -> str:
    ours = f"{ALIASES.get(name, name)}={setting_text(VALUES[name][word])}"
    return f"| `{name}={word}` | `{ours}` |\n"


def _table(section: str) -> str:
    rows = "".join(_row(f) for f in all_fields().values() if f.name.rpartition(".")[0] == section)
    return f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _row(field: Field) -> str:
    key = field.name.rpartition(".")[2]
    doc = field.doc.replace("|", "\\|")
    return f"| `{key}` | {field.type_name} | `{json.dumps(field.default)}` | {doc} |\n"


if __name__ == "__main__":
    print(reference_page(), end="")
