# The server on an NVIDIA GPU. Needs the NVIDIA Container Toolkit on the host.
#   docker build -t mini-infer .
#   docker run --gpus all -p 8000:8000 -v /models:/models:ro mini-infer --model /models/Qwen2.5-7B-Instruct
#
# The base image brings what lets a container see the host's driver; CUDA's libraries come with torch.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

# Triton compiles a small C module for each kernel when it is first called: a compiler and Python's headers.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/mini-infer \
 && useradd --create-home --uid 10001 mini-infer
ENV PATH=/opt/mini-infer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MINI_INFER_PORT=8000

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY mini_infer mini_infer
RUN python -m pip install --no-cache-dir --constraint constraints.txt '.[serve,flash]'

USER mini-infer
WORKDIR /home/mini-infer
EXPOSE 8000
# A large model takes minutes to load; until then a failed check means nothing. Another port: set MINI_INFER_PORT.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"MINI_INFER_PORT\"]}/healthz', timeout=4)"]
ENTRYPOINT ["mini-infer-serve", "--host", "0.0.0.0"]
