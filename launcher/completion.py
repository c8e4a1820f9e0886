"""What the Tab key of bash or zsh offers behind our command."""

from argparse import SUPPRESS
from collections.abc import Sequence

from launcher.arguments import parser_of
from launcher.verbs import RUN, VERBS, Verb
from model_check.config.arguments import Parser, add_settings_options
from model_check.config.fields import all_fields
from model_check.config.load import preset_names
from model_check.utils.project_files import COMMAND

_ABOUT = """\
Print a script with which the Tab key completes verbs, options, settings and presets.
"""
_HELP = """
examples:
  bash run.sh completion                        for bash: source it in ~/.bashrc
  bash run.sh completion zsh                    for zsh: source it in ~/.zshrc
"""
_WORDS = """\
# For the Tab key: source <(./run.sh completion {shell}), or <(model-check completion {shell})
_model_check_words() {{ # WORD BEFORE ...: what WORD may become behind these; nothing: a file
    local word=$1 verb=${{3-}} num=$# before flags= also= next= settings='{settings}'
    shift
    for before; do [ "$before" = -- ] && return; done # a command of your own follows
    case $verb in
{cases}
    esac
    [ "$num" -gt 3 ] && next=
    case $before:$word in
        --preset:*) next='{presets}' ;;
        *:-*) next=$flags ;;
        *:?*) next="$next $also" ;;
    esac
    printf '%s\\n' "$next"
}}
"""
_CASE = "        {name}) flags='{options}' also={also} next='{words}' ;;"
_SHELLS = {
    "bash": """\
_model_check() {
    local word=${COMP_WORDS[COMP_CWORD]} offered
    COMPREPLY=()
    [[ $word == '=' || ${COMP_WORDS[COMP_CWORD - 1]} == '=' ]] && return 0 # a value: files
    offered=$(_model_check_words "$word" "${COMP_WORDS[@]:0:COMP_CWORD}")
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
    [[ ${COMPREPLY-} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o bashdefault -o default -F _model_check model-check run.sh""",
    "zsh": """\
_model_check() {
    local -a offered
    compset -P '*=' && { _files; return } # a value
    offered=(${=$(_model_check_words "$PREFIX" "${(@)words[1,CURRENT-1]}")})
    compadd -- ${offered:#*=}
    compadd -S '' -- ${(M)offered:#*=}
    ((compstate[nmatches])) || _files
}
(($+functions[compdef])) || { autoload -Uz compinit && compinit -i }
compdef _model_check model-check run.sh""",
}


def completion(argv: Sequence[str]) -> str:
    """The script for a shell. Raises UsageError for another one."""
    shell = _parser().read(argv).shell
    own = [(verb.name, verb, verb.words) for verb in VERBS.values() if verb.name != "help"]
    rows = [("'' | help", RUN, " ".join(VERBS)), *own, ("*", RUN, "")]
    script = _WORDS.format(
        shell=shell,
        settings=" ".join(f"{name}=" for name in all_fields()),
        presets=" ".join(preset_names()),
        cases="\n".join(
            _CASE.format(
                name=name,
                options=" ".join(options_of(verb)),
                also="$settings" if verb.help or verb.takes_settings else "",
                words=words,
            )
            for name, verb, words in rows
        ),
    )
    return script + _SHELLS[shell]


def _parser() -> Parser:
    verb = VERBS["completion"]
    parser = Parser(usage=f"{COMMAND} {verb.usage}", description=_ABOUT, epilog=_HELP)
    parser.add_argument("shell", nargs="?", choices=[*_SHELLS], default="bash", help="bash")
    return parser


def options_of(verb: Verb) -> list[str]:
    """`--gpus`, `--mode`, ...: those that its help lists."""
    parser = parser_of(verb) if verb.help else Parser()
    if verb.takes_settings:
        add_settings_options(parser)
    names = [n for a in parser._actions if a.help != SUPPRESS for n in a.option_strings]
    return [*(name for name in names if name.startswith("--")), *verb.options.split()]
