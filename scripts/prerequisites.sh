#!/bin/sh
# Names every missing system tool at once, with the Debian package that has it; installs them when asked to.
# Usage: scripts/prerequisites.sh [--install]
set -eu

missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need git git
need gcc gcc
need g++ g++
need make make
need cmake cmake

supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.12 python3.11 python3; do
        if "$candidate" -c "$supported" 2>/dev/null; then python=$candidate; break; fi
    done
fi
if [ -z "$python" ] || ! "$python" -c "$supported" 2>/dev/null; then
    echo "No Python 3.11 or 3.12 was found (pypto has wheels for no newer one): install one, or name it with PYTHON=" >&2
    exit 1
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"

[ -n "$missing" ] || exit 0
if [ "${1:-}" = "--install" ]; then
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    exit 0
fi
echo "These tools are missing:$missing" >&2
echo "On Debian or Ubuntu: sudo apt-get install$missing" >&2
exit 1
