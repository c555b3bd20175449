#!/bin/sh
# `redis.sh serve` starts Redis with the password of a secret file, which then stands in no command line and no
# environment; `redis.sh health` is the health check. Waits for a secret that is missing or empty, and says so.
set -eu
secret=/run/secrets/redis_password
least_kb=65536
changed="the secret redis_password is no longer the one that Redis was started with: docker compose up -d --force-recreate"
missing="the secret redis_password is missing or empty: run scripts/stack-secrets.sh, then docker compose up -d --force-recreate redis"

serve() {
    until [ -s "$secret" ]; do
        echo "redis: $missing" >&2
        sleep 10
    done
    # From standard input, so that the file with the password is written nowhere.
    exec redis-server - <<CONF
$(cat /etc/redis/redis.conf)
maxmemory ${REDIS_MAXMEMORY:-1gb}
requirepass "$(sed 's/["\\]/\\&/g' "$secret")"
CONF
}

# A Redis that cannot write its file ends, and is well again until the next write: so free space is looked at here. The
# answer to PING names the rest: LOADING at start, NOAUTH, MISCONF.
health() {
    [ -s "$secret" ] || { echo "$missing"; exit 1; }
    free=$(df -Pk /data | awk 'NR == 2 {print $4}')
    [ "$free" -ge "$least_kb" ] || {
        echo "the volume redis is full: $free kB are free, below $least_kb kB Redis is not well; make room on the disk with Docker's volumes"
        exit 1
    }
    answer=$(REDISCLI_AUTH=$(cat "$secret") timeout 4 redis-cli --no-auth-warning ping 2>&1) || true
    case $answer in *WRONGPASS*) answer=$changed ;; esac
    echo "$answer"
    [ "$answer" = PONG ]
}

case "${1:-}" in
serve | health) "$1" ;;
*) echo "usage: redis.sh serve | health" >&2; exit 2 ;;
esac
