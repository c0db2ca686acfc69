#!/usr/bin/env bash
# Runs pytest on tests/ and exits with its status. `make` turns every status into 2: who needs pytest's own
# names a file in RTJ_TEST_STATUS.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
.venv/bin/python -m pytest "$@" </dev/null
status=$?
if [ -n "${RTJ_TEST_STATUS:-}" ]; then echo "$status" > "$RTJ_TEST_STATUS"; fi
exit "$status"
