# syntax=docker/dockerfile:1
# Three images of one source: `api` (a pod: no Ray, no engine), `worker-llamacpp` and `worker-vllm` (replicas, under Ray or alone).
#   docker buildx build --target api --sbom=true --provenance=mode=max -t headrace/api:0.1.0 .
# Every package is locked by hash. The base image is an argument, to be given by digest: see docs/release.md.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

# -- the project's own wheel
FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/wheel.txt requirements/wheel.txt
RUN python -m venv /opt/wheel && /opt/wheel/bin/pip install --require-hashes -r requirements/wheel.txt
COPY pyproject.toml README.md LICENSE ./
COPY broker broker
COPY api api
COPY workers workers
COPY cluster cluster
COPY cli cli
COPY client client
RUN /opt/wheel/bin/python -W ignore -m build --wheel --no-isolation --outdir /dist

# -- what each image has in /opt/headrace
FROM ${PYTHON_IMAGE} AS api-packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/api.txt requirements/api.txt
RUN python -m venv /opt/headrace && /opt/headrace/bin/pip install --require-hashes -r requirements/api.txt
COPY --from=wheel /dist /dist
RUN /opt/headrace/bin/pip install --no-deps /dist/headrace-*.whl && /opt/headrace/bin/python -m compileall -q /opt/headrace

FROM ${PYTHON_IMAGE} AS llamacpp-packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/base.txt requirements/base.txt
RUN python -m venv /opt/headrace && /opt/headrace/bin/pip install --require-hashes -r requirements/base.txt
COPY --from=wheel /dist /dist
RUN /opt/headrace/bin/pip install --no-deps /dist/headrace-*.whl && /opt/headrace/bin/python -m compileall -q /opt/headrace

FROM ${PYTHON_IMAGE} AS vllm-packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements/vllm.txt requirements/vllm.txt
RUN python -m venv /opt/headrace && /opt/headrace/bin/pip install --require-hashes -r requirements/vllm.txt
COPY --from=wheel /dist /dist
RUN /opt/headrace/bin/pip install --no-deps /dist/headrace-*.whl && /opt/headrace/bin/python -m compileall -q /opt/headrace

# -- the images
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/headrace/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HEADRACE_DATA=/data
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headrace \
    && install -d -o headrace -g headrace /data /etc/headrace
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["headrace"]

FROM base AS api
COPY --from=api-packages /opt/headrace /opt/headrace
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
CMD ["api", "--config", "/etc/headrace/headrace.yaml"]

FROM base AS worker-llamacpp
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 wget \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=llamacpp-packages /opt/headrace /opt/headrace
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9100/metrics', timeout=2)"]
CMD ["worker", "--config", "/etc/headrace/headrace.yaml", "--metrics-port", "9100"]

FROM base AS worker-vllm
USER 0:0
# A C compiler and Python's headers, which Triton calls at run time; the CUDA libraries come with the packages, the
# driver with the node.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 wget \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 XDG_CACHE_HOME=/data/cache
COPY --from=vllm-packages /opt/headrace /opt/headrace
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=3s --start-period=900s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9100/metrics', timeout=2)"]
CMD ["worker", "--config", "/etc/headrace/headrace.yaml", "--metrics-port", "9100"]
