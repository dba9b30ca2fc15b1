#!/bin/sh
# Prints the path of a Python interpreter that can run this project, or says in one line how to get one.
#
# Looks in this order: $PYTHON, pyenv (first the version in .python-version), the PATH, uv.
# Nothing but a POSIX shell is needed.
set -u
cd "$(dirname "$0")/.." || exit 1
read -r wanted <.python-version
minor=${wanted#3.}
minor=${minor%%.*}
lacks_venv=
seen=

# usable CANDIDATE: prints its real path (not a shim's, nor a virtual environment's) if it will do.
usable() {
    # The version comes first: an old interpreter may not even parse what follows. Nor may this be
    # more than Python 2 can parse.
    path=$("$1" -c "import sys
path = getattr(sys, '_base_executable', sys.executable)
new = sys.version_info >= (3, $minor)
print(path if new else 'Python %d.%d.%d (%s)' % (tuple(sys.version_info[:3]) + (path,)))
sys.exit(not new)" 2>/dev/null </dev/null) || {
        # A shim that refuses prints nothing: it is not an interpreter that was seen.
        seen=${seen:-$path}
        return 1
    }
    # Debian ships an interpreter without what makes virtual environments.
    if ! "$1" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
        lacks_venv=$path
        return 1
    fi
    printf '%s\n' "$path"
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    [ -z "$lacks_venv" ] || fail "PYTHON=$PYTHON cannot create virtual environments: install its venv module, or name another one."
    fail "PYTHON=$PYTHON is not a working Python $wanted or newer: name another one, or unset PYTHON to have one found."
fi

# pyenv's interpreters, asked directly: its shims refuse whatever .python-version does not name.
pyenv_root=$(pyenv root 2>/dev/null </dev/null) || pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
if [ -d "$pyenv_root/versions" ]; then
    installed=$(cd "$pyenv_root/versions" && ls | grep -E '^3\.[0-9]+\.[0-9]+$' |
        awk -F. -v minor="$minor" '$2 >= minor' | sort -t. -k2,2n -k3,3nr)
    for version in $(printf '%s\n' "$installed" | grep "^$wanted\\.") $installed; do
        usable "$pyenv_root/versions/$version/bin/python" && exit 0
    done
fi

for name in "python$wanted" python3.13 python3.14 python3 python; do
    command -v "$name" >/dev/null 2>&1 && usable "$name" && exit 0
done

if command -v uv >/dev/null 2>&1; then
    found=$(uv python find "$wanted" 2>/dev/null </dev/null) && usable "$found" && exit 0
    if uv python install "$wanted" >&2 </dev/null; then
        found=$(uv python find --managed-python "$wanted" 2>/dev/null </dev/null) && usable "$found" && exit 0
    fi
fi

[ -z "$lacks_venv" ] || fail "$lacks_venv cannot create virtual environments: install its venv module (on Debian and Ubuntu: apt install python$wanted-venv)."
fail "Python $wanted or newer is needed, and ${seen:+only }${seen:-none} was found: run 'pyenv install $wanted' or 'uv python install $wanted', install it from your system's packages or python.org, or name one with PYTHON=/path/to/python."
