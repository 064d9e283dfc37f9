# Stageline with CUDA, and an engine of another project in an environment of its own beside it. Never built.
#
#   docker build --file slurm/container/engines.Dockerfile --target vllm --tag stageline-vllm:0.1.0 .
#   docker build --file slurm/container/engines.Dockerfile --target tensorrt_llm --tag stageline-tensorrt-llm:0.1.0 .
#
# A worker starts its engine as a child process, so both are in one image; engine.python is .engines/NAME/bin/python.
ARG STAGELINE=stageline:0.1.0

FROM ${STAGELINE} AS vllm
RUN make engine-vllm PYTHON=python3.12 VLLM=vllm==0.32.0

FROM ${STAGELINE} AS tensorrt_llm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libopenmpi-dev \
    && rm -rf /var/lib/apt/lists/*
RUN make engine-trtllm PYTHON=python3.12 TRTLLM=tensorrt-llm==1.2.1
