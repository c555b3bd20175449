# Debian's redis-server. Installed unless BASE_IMAGE has it already.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
RUN command -v redis-server >/dev/null \
 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*)
RUN echo "agent:x:10001:10001:agent:/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "agent:x:10001:" >>/etc/group \
 && mkdir -p /etc/redis && install -d -o 10001 -g 10001 /data
USER 10001:10001
WORKDIR /data
EXPOSE 6379
CMD ["redis-server"]
