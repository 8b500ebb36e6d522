# Sourced by the other scripts with the requirements file to install: creates .venv if it does not exist and puts it
# on the PATH. TREAD_VENV names another folder (full path); PYTHON another interpreter.
venv=${TREAD_VENV:-$PWD/.venv}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then      # absent, or half made when it was interrupted
    python=${PYTHON:-$(python3.12 -c 'print("python3.12")' 2>/dev/null || echo python3)}
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || {
        echo "Python 3.11 to 3.14 is needed and $python is $("$python" --version 2>&1). Set PYTHON=<path of one>." >&2
        exit 1
    }
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
# The stamp records what was installed last: a second call costs nothing, and a changed file is installed again.
stamp="$venv/.installed-$(basename "$1")"
if ! cat requirements*.txt | cmp -s - "$stamp"; then
    echo "Installing $1: 6 GB the first time, which takes minutes and shows nothing"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --progress-bar on -r "$1"
    cat requirements*.txt > "$stamp"
fi
export PATH="$venv/bin:$PATH"
