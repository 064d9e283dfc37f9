# Stageline with CUDA: driver, trainers, scorers and the embedded engine. Never built.
#
#   docker build --file slurm/container/trainer.Dockerfile --tag stageline:0.1.0 .
#
# Versions are those of the Makefile and requirements/lock.txt. torch's wheels bring their own CUDA 13.0 libraries; the base
# has the compilers that Triton and the C kernels call. Without the verbs libraries NCCL uses TCP instead of InfiniBand.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make python3.12 python3.12-dev python3.12-venv \
       libibverbs1 ibverbs-providers rdma-core \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/stageline

# The dependencies first: a change of the sources does not install torch again.
COPY Makefile pyproject.toml ./
COPY requirements requirements
RUN make .venv/.installed/lock PYTHON=python3.12 TORCH=torch==2.13.0

COPY . .
RUN make install PYTHON=python3.12 TORCH=torch==2.13.0
ENV PATH=/opt/stageline/.venv/bin:$PATH
ENTRYPOINT []
CMD ["stageline", "--help"]
