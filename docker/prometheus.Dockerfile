# Debian's prometheus, with the paths of the upstream image. Installed unless BASE_IMAGE has it already.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}
RUN command -v prometheus >/dev/null \
 || (apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/*)
RUN echo "agent:x:10001:10001:agent:/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "agent:x:10001:" >>/etc/group \
 && mkdir -p /etc/prometheus && install -d -o 10001 -g 10001 /prometheus
USER 10001:10001
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
