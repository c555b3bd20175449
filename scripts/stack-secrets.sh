#!/usr/bin/env bash
# Makes what `docker compose up` needs and no repository holds: the secrets in secrets/ and .env with this machine's
# settings. Nothing that is there is overwritten: to change a secret, delete its file and run this again. An argument
# names another folder than the checkout.
#   DOCKER_SOCKET=/path/to/docker.sock   AGENT_R3_CACHE=/path/to/cache   where they are not in the usual place
#   AGENT_R3_MODEL=/path/to/model                                        to train another model than the tiny policy
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "${1:-$root}"

die() { echo "stack-secrets: $*" >&2; exit 2; }

# Only the owner can enter the folder; the files can be read by the services' user, into which Docker mounts each.
make_secret() {
  [ ! -s "secrets/$1" ] || return 0
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"secrets/.$1.new"
  chmod 444 "secrets/.$1.new"
  mv -f "secrets/.$1.new" "secrets/$1"
  echo "stack-secrets: made secrets/$1"
}

make_env() {
  [ ! -e .env ] || return 0
  local socket=${DOCKER_SOCKET:-/var/run/docker.sock} cache=${AGENT_R3_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/agent-r3}
  local model=${AGENT_R3_MODEL:-}
  [ -S "$socket" ] || die "there is no Docker socket at $socket; start Docker, or set DOCKER_SOCKET"
  [ -n "$model" ] || model=$(AGENT_R3_CACHE=$cache "$root/.venv/bin/python" -c 'import agent_r3.tiny as t; print(t.tiny_folder())') ||
    die "the tiny policy's folder is not known without .venv: run \`make demo\` first, or set AGENT_R3_MODEL"
  [ -f "$model/config.json" ] || die "there is no model in $model: run \`make demo\` first, or set AGENT_R3_MODEL"
  [ -z "$(find -L "$model" ! -perm -o=r -print -quit)" ] ||
    die "the services' user cannot read all of $model: chmod -R o+rX $model"
  sed -e "s|^AGENT_R3_MODEL=.*|AGENT_R3_MODEL=$model|" -e "s|^DOCKER_GID=.*|DOCKER_GID=$(stat -L -c %g "$socket")|" \
    -e "s|^AGENT_R3_CACHE=.*|AGENT_R3_CACHE=$cache|" "$root/.env.example" >.env.new
  [ "$socket" = /var/run/docker.sock ] || printf '\nDOCKER_SOCKET=%s\n' "$socket" >>.env.new
  mv .env.new .env
  echo "stack-secrets: wrote .env"
}

mkdir -p secrets
chmod 700 secrets
for name in redis_password broker_token grafana_password; do make_secret "$name"; done
make_env
