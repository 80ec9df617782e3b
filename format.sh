#!/usr/bin/env bash
# Format the code, apply ruff's safe fixes, then run the checks of `make lint`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
make format
exec make lint
