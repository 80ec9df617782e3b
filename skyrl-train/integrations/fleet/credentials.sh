#!/usr/bin/env bash
# Write the API keys of GPU clouds, from the environment, to the files that SkyPilot reads. Nothing is printed.
set -euo pipefail
umask 077

# Write standard input to a file, if the variable is set.
write() {
  [[ -n ${!1:-} ]] || { echo "credentials: $1 is not set; its cloud is not used" && return 0; }
  mkdir -p "$(dirname "$2")"
  cat >"$2"
}

write LAMBDA_API_KEY ~/.lambda_cloud/lambda_keys <<<"api_key = ${LAMBDA_API_KEY:-}"
write RUNPOD_API_KEY ~/.runpod/config.toml <<<"[default]
api_key = \"${RUNPOD_API_KEY:-}\""
write VAST_API_KEY ~/.config/vastai/vast_api_key <<<"${VAST_API_KEY:-}"
write PRIME_INTELLECT_API_KEY ~/.prime/config.json <<<"{\"api_key\": \"${PRIME_INTELLECT_API_KEY:-}\"}"
