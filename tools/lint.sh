#!/usr/bin/env bash
# Style and types, as CI runs them: ruff on everything, mypy strict on k3backend/common.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
environment_lint
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
