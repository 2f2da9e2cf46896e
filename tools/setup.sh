#!/bin/sh
# Build the virtual environment: with uv where it is there, else with venv and pip.
set -eu
venv="$1"
if command -v uv >/dev/null 2>&1; then
    [ -d "$venv" ] || uv venv -q "$venv"
    uv pip install -q --python "$venv/bin/python" -e '.[all]' --group dev
    exit 0
fi
python=""
for candidate in python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
[ -n "$python" ] || { echo "tokrate needs Python 3.11 or newer on the PATH" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# --group came with pip 25.1.
"$venv/bin/python" -m pip install -q --upgrade 'pip>=25.1'
echo "installing tokrate with everything into $venv (a few minutes: torch is large)"
"$venv/bin/python" -m pip install -q -e '.[all]' --group dev
