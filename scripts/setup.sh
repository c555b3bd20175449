#!/usr/bin/env bash
# Makes .venv with the pinned CPU stack. Idempotent: a second run is done when nothing changed.
#   PYTHON=/path/to/python3.11   interpreter to use
#   TORCH_INDEX=URL              package index to take torch from (for instance PyTorch's CPU index); default: pip's own
set -euo pipefail
cd "$(dirname "$0")/.."
torch=torch==2.13.0

die() { echo "setup: $*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 with venv was not found; install it (Debian 12: apt-get install python3.11-venv; anywhere: pyenv install 3.11) or set PYTHON=/path/to/python3.11"
}

stamp=.venv/.agent-r3-setup
want=$(cat requirements/cpu.lock pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

python=$(find_python)
echo "setup: making .venv with $("$python" --version)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }
# torch first and alone, so that its source can be chosen; the rest is a complete lock and needs no resolver.
pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
pip install --no-deps -r requirements/cpu.lock
pip install --no-deps --no-build-isolation --editable .
echo "$want" > "$stamp"
echo "setup: .venv is ready"
