# One command each. Everything runs in .venv, which is made on first use (scripts/setup_env.sh says what can be chosen).

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX_URL ?=
export PYTHON TORCH_SPEC TORCH_INDEX_URL
# Ranks are processes: more than one thread in each only gets in the others' way.
export OMP_NUM_THREADS ?= 1
# Every rank imports the package and its tests: what one process has compiled, the next dozens only read.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready
SOURCES := src tests examples scripts/house.py $(wildcard benchmarks)

RANKS ?= 4
TRAIN ?= --layout fsdp2+tp --compare --out demo-out
VERIFY ?= --ranks 4
BENCH ?=
GPU ?=
GOLDEN ?=
HOUSE ?=

NVME ?=
DOCS ?=
ZOO ?=
STACK ?=

.PHONY: help setup demo verify bench bench-ns gpu golden house test fast nvme zoo stack docs check lint format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(READY) ## make .venv with torch, shardmuon and its tools

$(READY): pyproject.toml scripts/setup_env.sh
	@bash scripts/setup_env.sh

demo: $(READY) ## train a small language model on 4 ranks and prove its update (RANKS=... TRAIN="..." for others)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train.py $(TRAIN)

verify: $(READY) ## compare every layout's update with that of one process (VERIFY="...")
	$(BIN)/shardmuon verify $(VERIFY)

bench: $(READY) ## time optimizer steps (BENCH="...")
	$(BIN)/python benchmarks/step_time.py $(BENCH)

bench-ns: $(READY) ## errors, FLOPs and speed of Newton-Schulz (BENCH="...")
	$(BIN)/python benchmarks/orthogonalize.py $(BENCH)

gpu: $(READY) ## what only GPUs can tell: no waits, a captured step, kernels, layouts on NCCL, memory, times (GPU="...")
	$(BIN)/python -m pytest tests/test_gpu.py -q
	$(BIN)/python benchmarks/gpu.py $(GPU)

golden: $(READY) ## updates and state of the working tree against those of a commit, bit for bit (BASE=<commit> GOLDEN="...")
	$(BIN)/python scripts/golden.py --base $(or $(BASE),$(error say BASE=<commit>)) $(GOLDEN)

house: $(READY) ## size and shape of the code and of one step, beside the bars set for them (HOUSE="--only 4 5 --list")
	$(BIN)/python scripts/house.py $(HOUSE)

test: $(READY) ## all tests in this CPU's arithmetic and, beside them, the numeric ones in the other (bf16 or fp32 products)
	$(BIN)/python -m pytest --both-arithmetics

fast: $(READY) ## the tests that need one process only
	$(BIN)/python -m pytest -m "not ranks"

nvme: $(READY) ## the tests with real swap files; first compiles DeepSpeed's async_io (minutes) (NVME=--if-possible)
	@bash scripts/nvme.sh $(NVME)

zoo: ## routing of models of transformers, timm, torchvision and peft, in .venv-stack, made on first use (ZOO=--if-possible)
	@bash scripts/stack.sh zoo $(ZOO)

stack: ## the examples with transformers, TRL, accelerate, Lightning, peft, timm, .. in .venv-stack, made on first use (STACK=--if-possible)
	@bash scripts/stack.sh stack $(STACK)

docs: ## build the documentation site and serve it (DOCS=build builds it, DOCS=test opens it in a headless browser)
	@bash scripts/docs.sh $(DOCS)

check: lint test ## all that must pass before a change goes in

lint: $(READY) ## format, lint, types and layers, without changing a file
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY) ## format the code and apply safe lint fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean: ## remove .venv, caches and outputs
	rm -rf .venv .venv-stack .venv-docs .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out build src/*.egg-info
	find src tests -name __pycache__ -prune -exec rm -rf {} +
