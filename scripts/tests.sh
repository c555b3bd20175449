#!/usr/bin/env bash
# Every test, in two sessions side by side: those of the stack, which mostly wait for containers, and all others. The
# output of the stack's comes at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp "${TMPDIR:-/tmp}/agent-r3-stack-tests.XXXXXX.log")

.venv/bin/pytest --durations=10 tests/stack >"$log" 2>&1 &
stack=$!
trap 'kill -INT "$stack" 2>/dev/null || true' INT TERM
failed=0
.venv/bin/pytest --durations=25 --ignore=tests/stack || failed=$?
wait "$stack" || failed=$?
trap - INT TERM
cat "$log"
rm -f "$log"
exit "$failed"
