# A role on an upstream image that brings its CUDA stack: SGLang's for the engine, NVIDIA's PyTorch for the trainer. Used
# by docker-compose.gpu.yml; never built so far. These bases hold compilers, which Triton and CUDA kernels call at run time.
#   BASE_IMAGE   with Python 3.11 or later, torch and pip
#   EXTRAS       of pyproject.toml, on top of what the base has
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG EXTRAS
RUN echo "agent:x:10001:10001:agent:/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "agent:x:10001:" >>/etc/group \
 && mkdir -p /etc/agent-r3 && install -d -o 10001 -g 10001 /runs /cache
COPY pyproject.toml README.md /src/
COPY agent_r3 /src/agent_r3
COPY envs /src/envs
COPY tools /src/tools
COPY rollout /src/rollout
COPY trainer /src/trainer
COPY eval /src/eval
# Whatever the base has of the CUDA stack stays as it is.
RUN python3 -m pip freeze | grep -iE '^(torch|triton|nvidia|flashinfer|sgl|transformer.engine)' | grep -v ' @ ' >/tmp/keep.txt; \
    python3 -m pip install --no-cache-dir --constraint /tmp/keep.txt "/src[${EXTRAS}]" && rm -rf /tmp/*
ENV HOME=/tmp AGENT_R3_CACHE=/cache MPLCONFIGDIR=/tmp/matplotlib LANG=C.UTF-8 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /runs
ENTRYPOINT ["agent-r3"]
CMD ["--help"]
