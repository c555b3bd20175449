# The image of every role; they differ in the lock of requirements/images that they hold. scripts/images.sh builds them.
#   BASE_IMAGE    Debian with Python 3.11
#   LOCK          rollout | broker | learner
#   TORCH_INDEX   package index that has CPU builds of torch
#   IMPORTS       modules that are imported once while building, which leaves their bytecode; when empty, every package
#                 is compiled
# Packages come from pip's index, or from docker/wheels/LOCK when scripts/wheels.py has filled it; then the build needs
# no network. The secret `ca` is a bundle of certificates for pip.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS pip
COPY requirements/images/build.lock docker/wheels/build* /build/
RUN --mount=type=secret,id=ca \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    if ls /build/*.whl >/dev/null 2>&1; then from="--no-index --find-links /build"; fi; \
    python3 -m venv /mnt/pip \
 && /mnt/pip/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps $from -r /build/build.lock

# Wheels of everything in the lock. Only here may something be built.
FROM pip AS wheels
ARG LOCK
ARG TORCH_INDEX
COPY requirements/images/${LOCK}.lock docker/wheels/${LOCK}* /wheels/
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/pip \
    if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    ls /wheels/*.whl >/dev/null 2>&1 \
 || /mnt/pip/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir /wheels \
    ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -r /wheels/${LOCK}.lock

FROM pip AS package
# .gitignore is there so that docker/wheels is: without it, a pattern above that matches nothing would be an error.
COPY pyproject.toml README.md docker/wheels/.gitignore /src/
COPY agent_r3 /src/agent_r3
COPY envs /src/envs
COPY tools /src/tools
COPY rollout /src/rollout
COPY trainer /src/trainer
COPY eval /src/eval
RUN /mnt/pip/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index \
    --wheel-dir /dist /src

FROM ${BASE_IMAGE}
# /cache/* exist so that named volumes laid over them belong to the user.
RUN echo "agent:x:10001:10001:agent:/tmp:/usr/sbin/nologin" >>/etc/passwd && echo "agent:x:10001:" >>/etc/group \
 && mkdir -p /etc/agent-r3 \
 && install -d -o 10001 -g 10001 /runs /cache /cache/models /cache/datasets /cache/pulled
ARG LOCK
ARG IMPORTS
# Static libraries, headers, jars and CUDA tools come with some wheels and are used by none of the roles. What SGLang and
# verl need in order to be imported on a CPU is laid in from the sources, so that this layer outlives changes to the rest.
RUN --mount=type=bind,from=pip,source=/mnt/pip,target=/mnt/pip \
    --mount=type=bind,from=wheels,source=/wheels,target=/mnt/wheels \
    --mount=type=bind,source=agent_r3/compat.py,target=/mnt/shims/agent_r3/compat.py \
    --mount=type=bind,source=rollout/sglang_server.py,target=/mnt/shims/agent_r3/rollout/sglang_server.py \
    if [ -n "$IMPORTS" ]; then compile=--no-compile; fi; \
    python3 -m venv --without-pip /opt/agent-r3 \
 && PYTHONDONTWRITEBYTECODE=1 /mnt/pip/bin/python -m pip --python /opt/agent-r3/bin/python install --quiet \
    --no-cache-dir --disable-pip-version-check --no-index --no-deps --find-links /mnt/wheels $compile \
    -r /mnt/wheels/${LOCK}.lock \
 && find /opt/agent-r3/lib \( -name '*.a' -o -name '*.jar' -o -path '*/torch/include' -o -path '*/torch/test' \
    -o -path '*/pyarrow/include' -o -path '*/pyarrow/tests' -o -path '*/triton/backends/nvidia/bin' \) \
    -prune -exec rm -rf {} + \
 && HOME=/tmp PYTHONPATH=/mnt/shims SGLANG_USE_CPU_ENGINE=1 /opt/agent-r3/bin/python -c \
    "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]" $IMPORTS \
 && rm -rf /tmp/* /tmp/.[a-z]*
RUN --mount=type=bind,from=pip,source=/mnt/pip,target=/mnt/pip \
    --mount=type=bind,from=package,source=/dist,target=/mnt/dist \
    PYTHONDONTWRITEBYTECODE=1 /mnt/pip/bin/python -m pip --python /opt/agent-r3/bin/python install --quiet \
    --no-cache-dir --disable-pip-version-check --no-index --no-deps /mnt/dist/*.whl
# The root file system may be read-only: what is written goes to /tmp or to a volume.
ENV PATH=/opt/agent-r3/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    AGENT_R3_CACHE=/cache \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /runs
ENTRYPOINT ["agent-r3"]
CMD ["--help"]
