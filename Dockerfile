# The environment and the program; the driver comes from the host, data and results go to /workspace:
#   docker build -t model-check .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" model-check --debug
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# gcc and Python's headers: torch.compile builds its kernels' launchers on the machine.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The environment first, from the files that decide it: a change of the program does not install anew.
WORKDIR /model_check
COPY pyproject.toml constraints.txt ./
COPY launcher/__init__.py launcher/
COPY launcher/install launcher/install
COPY model_check/__init__.py model_check/errors.py model_check/
COPY model_check/utils/__init__.py model_check/utils/project_files.py model_check/utils/
RUN PIP_NO_CACHE_DIR=1 PYTHONPATH=/model_check python3 -P -m launcher.install.environment run

COPY . .
RUN .venv/bin/python -m compileall -q launcher model_check \
    && useradd --create-home --uid 10001 model-check \
    && install -d -o model-check /workspace
USER model-check
WORKDIR /workspace
ENTRYPOINT ["bash", "/model_check/run.sh"]
