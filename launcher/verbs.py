"""The verbs of the command line, a row each. `--help`, dispatch, hints and the Tab key read it."""

from collections.abc import Sequence

from msgspec import Struct

from launcher.levels import LEVELS
from launcher.verdict import exit_codes
from model_check.config.fields import nearest
from model_check.errors import UsageError

_RUN_HELP = """\
Run the same short LLaMA training on every GPU and compare the workers.

{exit_codes}

verbs (run.sh VERB --help):
{verbs}

examples:
  bash run.sh                                   every GPU, the short check
  bash run.sh --debug                           small, with tensor dumps
  bash run.sh --gpus 0,2 training.max_steps=100
  bash run.sh -- python my_script.py            your own command on every GPU
  bash run.sh check -- python train.py          your own training, compared
  bash run.sh --run-both-models                 Infini-attention beside full
  bash run.sh --arm a --arm b training.learning_rate=1e-3
  bash run.sh --wheels wheels/                  a first start without network
  ./train_gpu.sh [GPU] [OPTIONS]                one GPU, 0 unless told
  ./train_auto_gpu.sh [OPTIONS]                 the freest GPU, reserved
"""
_CHECK_HELP = """\
Run the same short LLaMA training on every GPU, compare the workers, and say
before it starts how long it takes and what it does not test. With -- COMMAND
your own training with torch takes its place; not a line of it changes.

{exit_codes}

levels:
  quick                   20 steps: about 12 s on an H100
  full                    the steps of a plain run: 100, about 30 s on an H100
  burnin                  full again and again for an hour; the others go on
                          without a GPU that is named (launch.on_suspect)
What you give counts more than what the level says. A first run also makes the
environment and prepares its text. No level tests memory, the bandwidth of PCIe
and NVLink, or power: dcgmi diag -r 3 does.

With -- COMMAND each step of its torch optimizers is compared: batch, weights,
gradients, state of the optimizer. It must do the same each time: --seed N seeds
its random numbers, --deterministic makes torch take operations that repeat.
It ends by itself, or behind --max-steps. With quick it ends after 20 steps.
Where workers differ it runs again, up to that step, within launch.replay_s.

examples:
  bash run.sh check                             full
  bash run.sh check quick --gpus 0,1
  bash run.sh check burnin --soak 8h
  bash run.sh check --seed 1 --max-steps 200 -- python train.py
"""
_DOCTOR_HELP = """\
Say what of this machine is fine, what is not, and what to do. It changes
nothing, asks no network, and ends with the exit code of a run like this.

{exit_codes}

examples:
  bash run.sh doctor                            before the first run
  bash run.sh doctor launch.expect_gpus=8       a lost GPU is a FAIL
  bash run.sh doctor --json                     for machines
  bash run.sh doctor --quick                    a health check beside jobs
"""
_CONFIG_HELP = """\
Print every setting, its value and where it came from, as a run with these
arguments would have it.

examples:
  bash run.sh config show --debug
  bash run.sh config show --config my.json training.max_steps=20
  bash run.sh config show --json                for machines
"""
_TRAIN_HELP = """\
Train a small LLaMA on your own text: one worker (the freest GPU), a tokenizer of
its own, checkpoints in .checkpoints/. The preset `train`, where nothing else is said.

{exit_codes}

examples:
  bash run.sh train texts/                      a file or a directory of text
  bash run.sh train texts/ training.max_steps=5000 data.validation=held_out=0.05
  bash run.sh train texts/ --resume auto        go on from the newest checkpoint
"""


class Verb(Struct, frozen=True):
    """`run.sh USAGE`. The function `do_NAME` of cli.py carries it out, or `program` does."""

    usage: str
    """Its name, and what may follow it."""
    does: str
    """Its line of `run.sh --help`."""
    program: str = ""
    """Another program of ours, which replaces this process: a module, or a file of the project."""
    options: str = ""
    """Those of its own parser, for the Tab key."""
    words: str = ""
    """What may stand behind the name, where that is one of a few: for the Tab key."""
    takes_settings: bool = False
    """`section.key=value`, beside options of its own."""
    other_names: str = ""
    """What other tools call it: for `did you mean`."""
    starts_run: bool = False
    """Workers will start, and other nodes of a job may wait for them."""
    takes_command: bool = False
    """`-- COMMAND ...`, for the workers to run."""
    help: str = ""
    """Where its options are those of a run (arguments.py): the first paragraph stands above them,
    the others below."""

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


RUN = Verb("", "", starts_run=True, takes_command=True, help=_RUN_HELP)
"""What is done without a verb."""
_ROWS = (
    Verb("check [LEVEL]", "quick, full or burnin: a check of stated length",
         words=" ".join(LEVELS), other_names="quick full burnin diag test start",
         starts_run=True, takes_command=True, help=_CHECK_HELP),
    Verb("doctor", "what of this machine is fine, what is not, what to do", other_names="health",
         help=_DOCTOR_HELP),
    Verb("config show", "every setting, its value and where it came from", words="show",
         other_names="settings",
         help=_CONFIG_HELP),
    Verb("report RUN_DIR ...", "make the report of a run again, or one of many runs",
         options="--output --prometheus --drain --golden --write-golden --force"),
    Verb("watch [RUN_DIR ...]", "runs while they go, as a table", other_names="status top"),
    Verb("replay RUN_DIR", "compute the steps to a fault once more", options="--gpu"),
    Verb("runs [open | clear]", "list your run directories, open a report, clear old",
         options="--parent --days --dry-run --json", words="list open clear",
         other_names="ps list clean clear open"),
    Verb("forensics DOSSIER", "what a failed worker kept: tensors, values, bits",
         program="model_check.forensics"),
    Verb("history [UUID]", "which faults each GPU had in your runs so far",
         options="--file --json", words="forget"),
    Verb("prepare [OPTIONS]", "the token cache alone: build, --list, --verify, --gc",
         program="prepare_dataset.py", takes_settings=True,
         options="--list --verify --gc --older-than --result --midi --tokenizer-type --vocab-size "
                 "--max-length --stride --num-workers"),
    Verb("export CHECKPOINT OUT", "what transformers loads, made of a checkpoint",
         program="model_check.export", options="--dtype --tokenizer --max-shard-gb"),
    Verb("train TEXT", "train on your own text: one worker, checkpoints", other_names="resume",
         starts_run=True, help=_TRAIN_HELP),
    Verb("generate CHECKPOINT", 'what a trained model says: --prompt "Once upon a time"',
         program="model_check.generate", other_names="sample chat talk",
         options="--prompt --prompts --chat --system --raw --stop --max-tokens --temperature "
                 "--top-k --top-p --seed --tokenizer --device --midi --prompt-midi --prompt-notes "
                 "--json"),
    Verb("passkey", "how far back each kind of attention remembers",
         program="model_check.passkey", options="--arms --seeds --rows --json"),
    Verb("completion [bash | zsh]", "for the Tab key: source <(./run.sh completion)",
         words="bash zsh"),
    Verb("help [VERB]", "this text, or that of a verb"),
)  # fmt: skip
VERBS = {row.name: row for row in _ROWS}


def chosen(argv: Sequence[str]) -> tuple[Verb, list[str]]:
    """The verb of a command line, and what stands behind it. Raises UsageError for a word that is
    none."""
    first, *rest = argv or [""]
    if first == "help":
        return chosen([*rest, "--help"])
    if first in VERBS:
        return VERBS[first], rest
    if not first.startswith("-"):
        check_word(first)
    return RUN, [*argv]


def check_word(word: str) -> None:
    """Raises UsageError for a word in the place of section.key=value that is a verb, or none."""
    if word in VERBS:
        raise UsageError(f"{word}: a verb comes first: run.sh {word} ... (--help lists them)")
    if word.endswith(".py") and "=" not in word:
        raise UsageError(
            f"{word}: run.sh trains by itself: leave it out (`-- python {word}` runs your own)"
        )
    names = {n: v.name for v in VERBS.values() for n in (v.name, *v.other_names.split())}
    if word.isalpha() and (near := nearest(word, names)):
        raise UsageError(f"{word!r}: no such verb; did you mean {names[near]}? (--help lists them)")
    if word.isalpha():
        raise UsageError(f"{word!r}: no verb, no option, no section.key=value (see --help)")


def help_of(verb: Verb) -> tuple[str, str]:
    """What stands above the options of a run, and what stands below them."""
    rows = "\n".join(f"  {each.usage:<23} {each.does}" for each in VERBS.values())
    above, _, below = verb.help.partition("\n\n")
    return above, below.replace("{exit_codes}", exit_codes.for_help()).replace("{verbs}", rows)
