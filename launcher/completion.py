"""What bash's Tab key offers behind our command."""

from collections.abc import Sequence

from launcher.arguments import VERBS
from launcher.levels import LEVELS
from model_check.config.fields import all_fields
from model_check.config.load import preset_names

_SCRIPT = """\
# Words for bash's Tab key: source <(model-check completion), or <(./run.sh completion)
_model_check() {{
    local before=${{COMP_WORDS[COMP_CWORD - 1]}} words='{words}'
    COMPREPLY=()
    case $before in
        --preset) words='{presets}' ;;
        check) words='{levels}' ;;
        =) return 0 ;; # a value: files
    esac
    case ${{COMP_WORDS[1]-}} in doctor | check | config | train | -* | *.*) ;; *)
        ((COMP_CWORD == 1)) || return 0 ;; # a verb with options of its own
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    [[ ${{COMPREPLY-}} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}}
complete -o bashdefault -o default -F _model_check model-check run.sh
"""


def completion(options: Sequence[str]) -> str:
    """A script for bash. `options`: of a run."""
    settings = [f"{name}=" for name in all_fields()]
    return _SCRIPT.format(
        words=" ".join([*VERBS, *options, *settings]),
        presets=" ".join(preset_names()),
        levels=" ".join(LEVELS),
    ).rstrip("\n")
