# Where our environment is, whether it is ready, and which Python may make it. run.sh and check.sh
# source this; they set $root first.
#   MODEL_CHECK_VENV     another directory than .venv beside run.sh
#   MODEL_CHECK_PYTHON   this interpreter and no other

venv=${MODEL_CHECK_VENV:-$root/.venv}

if [[ -n ${PYTHONHOME-} ]]; then
    printf '[launcher] PYTHONHOME is left out: with it no Python but one finds its own library\n' >&2
    unset PYTHONHOME
fi

# Whether $venv was made of exactly these requirements, by an interpreter that is still the same
# file. The stamp is compared by content: the times in a fresh clone or a copied tree tell nothing.
ready() {
    local made_for made_by key
    [[ -r $venv/ready-run ]] || return 1
    { read -r made_for && read -r made_by; } <"$venv/ready-run" || return 1
    key=$(cat -- "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
    [[ ${key%% *} == "$made_for" && $venv/bin/python -ef $made_by ]]
}

# Tells whose programs run, where $venv belongs to somebody else than this user or root.
tell_owner() {
    [[ -O $venv ]] && return
    local owner
    owner=$(stat -Lc '%u %U' -- "$venv") || return 0
    [[ ${owner%% *} == 0 ]] && return
    local LC_ALL=C
    printf '[launcher] %s belongs to another user (%s), whose programs now run as you\n' \
        "${venv//[^[:print:]]/?}" "${owner#* }" >&2
}

# Whether the user named an interpreter, or activated another environment than $venv.
python_was_chosen() {
    [[ -n ${MODEL_CHECK_PYTHON-} ]] && return
    [[ -n ${VIRTUAL_ENV-} && ! $VIRTUAL_ENV -ef $venv ]]
}

# Sets $python to the first Python from 3.11 on, or ends with exit code 2.
find_python() {
    local candidates=(python3 python3.13 python3.12 python3.11 python3.14)
    if [[ -n ${MODEL_CHECK_PYTHON-} ]]; then
        candidates=("$MODEL_CHECK_PYTHON")
    elif python_was_chosen; then
        candidates=("$VIRTUAL_ENV/bin/python" "${candidates[@]}")
    fi
    for python in "${candidates[@]}"; do
        # -I -S: half the start-up time, and no site customisation
        "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    local LC_ALL=C names=${candidates[*]} # a variable may hold escape sequences: only plain ASCII
    printf '[launcher] error: no Python 3.11 or newer among: %s (install one, or name it in %s)\n' \
        "${names//[^[:print:]]/?}" MODEL_CHECK_PYTHON >&2
    exit 2
}
