#!/bin/sh
# Build an environment for one framework: tokrate, pytest and what a requirements file names.
set -eu
venv="$1" requirements="$2"
echo "installing $(grep -v '^#' "$requirements" | tr '\n' ' ')into $venv (a few minutes)"
if command -v uv >/dev/null 2>&1; then
    [ -d "$venv" ] || uv venv -q "$venv"
    uv pip install -q --python "$venv/bin/python" -e . pytest -r "$requirements"
    exit 0
fi
python=""
for candidate in python3.11 python3.12 python3 python3.13 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
[ -n "$python" ] || { echo "tokrate needs Python 3.11 or newer on the PATH" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q -e . pytest -r "$requirements"
