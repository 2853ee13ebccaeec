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

python=${PYTHON:-python3}
if command -v "$python" >/dev/null 2>&1; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
fi

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
