#!/bin/bash
# A Docker engine on a bare Debian or Ubuntu machine: `docker/engine.sh` makes one answer, `docker/engine.sh stop`
# stops the one that this script started by hand. Where an engine already answers, it does nothing.
set -euo pipefail
PIDFILE=/run/agent-r3-dockerd.pid
LOG=/var/log/agent-r3-dockerd.log

answers() { timeout 10 docker info >/dev/null 2>&1; }

give_up() {
    echo "engine.sh: $1" >&2
    exit 2
}

started_by_us() { [ -f "$PIDFILE" ] && [ "$(cat "/proc/$(cat "$PIDFILE")/comm" 2>/dev/null)" = dockerd ]; }

stop() {
    if ! started_by_us; then
        echo "engine.sh: no engine of ours is running"
        return 0
    fi
    local pid
    pid=$(cat "$PIDFILE")
    kill "$pid"
    for _ in $(seq 300); do
        [ -d "/proc/$pid" ] || return 0
        sleep 0.1
    done
    give_up "dockerd (pid $pid) is still stopping after 30 s; see $LOG"
}

install() {
    export DEBIAN_FRONTEND=noninteractive
    # iptables is only a recommendation of docker.io, and Debian 13 ships the command line apart.
    local packages=(docker.io iptables)
    apt-cache show docker-cli >/dev/null 2>&1 && packages+=(docker-cli)
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >"$LOG" 2>&1 && return 0
    apt-get update -qq >>"$LOG" 2>&1 || give_up "apt-get update failed; see $LOG"
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >>"$LOG" 2>&1 ||
        give_up "apt-get install ${packages[*]} failed; see $LOG"
}

start() {
    answers && return 0
    [ "$(id -u)" = 0 ] || give_up "no Docker engine answers; start it (systemctl start docker) or run this script as root"
    command -v apt-get >/dev/null ||
        give_up "no Docker engine answers; install and start one (https://docs.docker.com/engine/install/)"
    command -v dockerd >/dev/null && command -v docker >/dev/null && command -v iptables >/dev/null || install
    if [ -d /run/systemd/system ]; then
        systemctl start docker || give_up "systemctl start docker failed; see journalctl -u docker"
    elif ! started_by_us; then
        # Own session and no inherited descriptors, so that it outlives the terminal, pipe or CI step it was started from.
        setsid nohup dockerd --pidfile "$PIDFILE" --log-driver local >>"$LOG" 2>&1 </dev/null &
    fi
    for _ in $(seq 300); do
        answers && return 0
        sleep 0.1
    done
    give_up "dockerd does not answer after 30 s; see $LOG"
}

case "${1:-start}" in
start) start ;;
stop) stop ;;
*) give_up "usage: docker/engine.sh [start|stop]" ;;
esac
