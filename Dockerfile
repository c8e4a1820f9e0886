# The program and its environment; the driver comes from the host, data and results go to /workspace:
#   docker build -t model-check .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" -e HOME=/workspace \
#       --user "$(id -u):$(id -g)" model-check --debug
# Any base of Debian's or Ubuntu's with Python 3.11 or newer will do: --build-arg BASE=debian:12-slim
# A package index of your own, which stays out of the image: --secret id=pip.conf,src=pip.conf; its
# certificates: --secret id=ca.crt,src=ca.crt and, in pip.conf, cert = /run/secrets/ca.crt
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

# gcc and Python's headers: kernels and torch.compile's launchers are built on the machine.
# tini: pid 1 of a container gets no signal that it does not handle, and inherits orphans.
FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*

# From the files that decide the environment alone: a change of the program does not install anew.
FROM base AS environment
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /model_check
COPY pyproject.toml constraints.txt ./
COPY launcher/__init__.py launcher/
COPY launcher/install launcher/install
COPY model_check/__init__.py model_check/errors.py model_check/
COPY model_check/utils/__init__.py model_check/utils/project_files.py \
    model_check/utils/secrets.py model_check/utils/words.py model_check/utils/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    PIP_NO_CACHE_DIR=1 PYTHONPATH=/model_check python3 -P -m launcher.install.environment run

FROM base
RUN useradd --create-home --uid 10001 model-check && install -d -m 1777 /workspace
WORKDIR /model_check
COPY --from=environment /model_check/.venv .venv
COPY . .
RUN .venv/bin/python -m compileall -q launcher model_check
# By number: Kubernetes takes no name for proof that it is not root.
USER 10001
WORKDIR /workspace
ENTRYPOINT ["tini", "-s", "--", "bash", "/model_check/run.sh"]
