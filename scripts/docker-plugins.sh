#!/usr/bin/env bash
# `docker compose` (v2) and `docker buildx`, where Docker came without them. Where both answer, it does nothing.
# Debian 13 and Ubuntu have packages of them. Debian 12 has not: there the plugins of Debian 13, which need nothing but
# libc, are unpacked into $DOCKER_CONFIG/cli-plugins (~/.docker), with lists and keys of their own beside the system's.
set -euo pipefail
plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
suite=trixie

die() { echo "docker-plugins: $*" >&2; exit 2; }

there() {
  docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1
}

packaged() { # the system's own packages, by the names of Debian 13 and of Ubuntu
  local names=(docker-buildx docker-compose)
  [ -n "$(apt-cache madison docker-compose-v2 2>/dev/null)" ] && names=(docker-buildx docker-compose-v2)
  [ -n "$(apt-cache madison docker-buildx 2>/dev/null)" ] || return 1
  [ "$(id -u)" = 0 ] || die "apt-get install ${names[*]} as root, or install Docker's compose and buildx plugins"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${names[@]}" >/dev/null
}

unpacked() {
  local state uri keys=/usr/share/keyrings/debian-archive-keyring.gpg
  grep -q '^ID=debian' /etc/os-release 2>/dev/null && [ -f "$keys" ] || return 1
  uri=$(sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?(https?:[^ ]+) .*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
  [ -n "$uri" ] || return 1
  state=$(mktemp -d)
  # shellcheck disable=SC2064 # the variable is gone when the trap runs
  trap "rm -rf '$state'" EXIT
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/debs" "$state/tree" "$plugins"
  echo "deb [signed-by=$keys] $uri $suite main" >"$state/sources.list"
  local options=(-qq -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$state/lists"
    -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none)
  apt-get "${options[@]}" update || die "apt-get update of $suite failed"
  (cd "$state/debs" && apt-get "${options[@]}" download docker-compose docker-buildx) || die "apt-get download failed"
  local deb
  for deb in "$state"/debs/*.deb; do dpkg-deb -x "$deb" "$state/tree"; done
  install -m 755 "$state"/tree/usr/libexec/docker/cli-plugins/docker-{compose,buildx} "$plugins/"
}

command -v docker >/dev/null || die "no docker command; install Docker (docker/engine.sh does on Debian and Ubuntu)"
there && exit 0
if command -v apt-get >/dev/null; then
  packaged || unpacked || true
fi
there || die "docker compose or docker buildx is missing; install Docker's compose and buildx plugins (https://docs.docker.com/compose/install/linux/)"
