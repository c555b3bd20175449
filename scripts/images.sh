#!/usr/bin/env bash
# Builds images of the stack: scripts/images.sh [IMAGE...], by default all of
#   rollout broker trainer engine redis prometheus   as agent-r3/IMAGE:$AGENT_R3_TAG (the version of the package)
#   BASE_IMAGE=IMAGE     Debian with Python 3.11, for the roles (python:3.11-slim-bookworm)
#   DEBIAN_IMAGE=IMAGE   Debian, for redis and prometheus (debian:bookworm-slim)
#   TORCH_INDEX=URL      package index with CPU builds of torch (PyTorch's own)
#   BUILD_NETWORK=MODE   network while building: default or host
# PIP_CERT, when set, is used by pip while building and is in no image.
# Where no registry answers, bases are made of this machine's Debian packages and wheels come from its pip.
set -euo pipefail
cd "$(dirname "$0")/.."
export DOCKER_BUILDKIT=1
version=$(sed -nE 's/^version = "(.*)"/\1/p' pyproject.toml)
tag=${AGENT_R3_TAG:-$version}
network=${BUILD_NETWORK:-default}
# What trainer and engine import, down to every model class that SGLang looks at when it starts.
imports="agent_r3.rollout.sglang_server torch tensordict transformers.models.qwen3_moe.modeling_qwen3_moe verl.trainer.ppo.core_algos
  megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer megatron.core.dist_checkpointing
  megatron.core.transformer.moe.router_replay tensorboard.summary.writer.event_file_writer matplotlib.figure
  sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler
  sglang.srt.managers.detokenizer_manager sglang.srt.models.registry"

die() { echo "images: $*" >&2; exit 2; }

reachable() { docker image inspect "$1" >/dev/null 2>&1 || timeout 120 docker pull -q "$1" >/dev/null 2>&1; }

# Sets role_base, redis_base and prometheus_base, and fills docker/wheels where builds have no index.
choose_bases() {
  role_base=${BASE_IMAGE:-python:3.11-slim-bookworm}
  redis_base=${DEBIAN_IMAGE:-debian:bookworm-slim} prometheus_base=${DEBIAN_IMAGE:-debian:bookworm-slim}
  if [ -n "${BASE_IMAGE:-}" ] || reachable "$role_base"; then
    rm -rf docker/wheels/*/
    return
  fi
  echo "images: no registry answers; bases are made of this machine's packages" >&2
  scripts/setup.sh >&2
  scripts/test-services.sh # redis and prometheus
  role_base=$(.venv/bin/python -m tests.stack.base)
  case " $* " in *" redis "*) redis_base=$(.venv/bin/python -m tests.stack.base redis-server redis-cli) ;; esac
  case " $* " in *" prometheus "*) prometheus_base=$(.venv/bin/python -m tests.stack.base prometheus promtool) ;; esac
  network=none
  .venv/bin/python scripts/wheels.py
}

# build IMAGE DOCKERFILE BASE [ARGUMENT...]: quiet unless it fails.
build() {
  local image=$1 dockerfile=$2 base=$3 log
  shift 3
  log=$(mktemp "${TMPDIR:-/tmp}/agent-r3-$image.XXXXXX.log")
  if ! docker build --progress=plain --network "$network" -f "docker/$dockerfile" -t "agent-r3/$image:$tag" \
    --build-arg BASE_IMAGE="$base" --label agent-r3.base="$base" ${PIP_CERT:+--secret "id=ca,src=$PIP_CERT"} "$@" . \
    >"$log" 2>&1; then
    tail -n 25 "$log" >&2
    die "building $image failed; the whole log is $log"
  fi
  rm -f "$log"
  echo "images: agent-r3/$image:$tag $(docker image inspect -f '{{.Size}}' "agent-r3/$image:$tag" |
    awk '{printf "%.0f MB", $1 / 1e6}'), ${SECONDS} s"
}

build_one() {
  case $1 in
  rollout | broker) build "$1" agent.Dockerfile "$role_base" --build-arg LOCK="$1" ;;
  trainer | engine)
    build "$1" agent.Dockerfile "$role_base" --build-arg LOCK=learner --build-arg IMPORTS="$(echo $imports)" \
      --build-arg TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
    ;;
  redis) build redis redis.Dockerfile "$redis_base" ;;
  prometheus) build prometheus prometheus.Dockerfile "$prometheus_base" ;;
  *) die "there is no image $1: rollout broker trainer engine redis prometheus" ;;
  esac
}

[ $# -gt 0 ] || set -- rollout broker trainer engine redis prometheus
scripts/docker-plugins.sh
docker info >/dev/null 2>&1 || die "no Docker engine answers; start it (docker/engine.sh does on Debian and Ubuntu)"
exec 9>"${TMPDIR:-/tmp}/agent-r3-images.lock"
flock 9 # bases and wheels are made in one place
choose_bases "$@"
for image in "$@"; do build_one "$image"; done
