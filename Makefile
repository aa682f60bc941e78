# Every target makes .venv first where it is missing or older than pyproject.toml or constraints.txt.
# Needed beforehand: make and Python 3.10 or newer (make PYTHON=python3.12 names another one).
PYTHON ?= python3
# One more than processors: a test of several processes often waits for one of them.
JOBS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
BIN := .venv/bin
STAMP := .venv/.stamp
OLD_PYTHON := "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": name one with make PYTHON=python3.11"

# The tests start many processes: each would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-pipeline demo-partial demo-sweep test thorough quick lint checks pytest everything conformance matrix matrix-quick ray gpu docs clean

# ddp with AdamW and with Muon, then gossip with Muon, which differs from the second by the strategy alone; a table and a picture.
demo: DEMO := outputs/demo-$(shell date +%Y%m%d-%H%M%S)
demo: $(STAMP)
	$(BIN)/python recipes/train.py experiment=demo_ddp hydra.run.dir=$(DEMO)/ddp-adamw
	$(BIN)/python recipes/train.py experiment=demo_ddp optimizer=muon hydra.run.dir=$(DEMO)/ddp-muon
	$(BIN)/python recipes/train.py experiment=demo hydra.run.dir=$(DEMO)/gossip-muon
	$(BIN)/lightning-decentral report $(DEMO)/ddp-adamw $(DEMO)/ddp-muon $(DEMO)/gossip-muon --plot $(DEMO)/comparison.png

demo-pipeline: $(STAMP)
	$(BIN)/python recipes/train.py experiment=demo_pipeline

demo-partial: $(STAMP)
	$(BIN)/python recipes/train.py experiment=demo_partial

demo-sweep: $(STAMP)
	$(BIN)/python recipes/train.py -m experiment=demo_sweep optimizer.lr=1e-3,3e-4,1e-4 model.config.hidden_size=64,96 \
		hydra/launcher=shard_parallel hydra.launcher.devices=2

# Beside each other: the checkers take a minute of one processor.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 checks pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not thorough"

# Before a release: all cases of costly tests, too (tests/sampled.py), and those of tools that seldom change.
thorough: $(STAMP)
	$(MAKE) --no-print-directory -j2 checks everything

everything: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS)

# Lightning's own tests with our strategies in place of ddp, from a checkout of its repository; some half hour.
conformance: $(STAMP)
	$(if $(LIGHTNING),,$(error make conformance LIGHTNING=/path/to/a/checkout of Lightning-AI/pytorch-lightning))
	$(BIN)/python benchmarks/conformance $(LIGHTNING)

# A clean environment with the oldest or the newest versions that are allowed, pre-releases included; gigabytes, and minutes of downloading.
matrix: $(STAMP)
	$(if $(and $(PART),$(WORK)),,$(error make matrix PART=oldest WORK=/a/folder [INTERPRETER=python3.10]; PART is oldest or newest))
	$(BIN)/python benchmarks/matrix.py $(PART) --work $(WORK) $(if $(INTERPRETER),--python $(INTERPRETER)) --write

# Sweeps under Hydra's newest version, pre-releases included, laid over .venv; skipped where there is nothing newer.
matrix-quick: $(STAMP)
	$(BIN)/python benchmarks/matrix.py quick --work $(or $(WORK),build/matrix)

# Under a real Ray, in an environment laid over .venv: what Ray Train installs changes Lightning's default logger. A quarter of an hour.
ray: $(STAMP)
	$(BIN)/python -m venv build/ray
	printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" \
		> "$$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	build/ray/bin/python -m pip install -q -c constraints.txt "ray[train]"
	build/ray/bin/python -m pytest tests/processes/test_ray.py

# What a CUDA device says of the predictions, in parts of ten minutes at most; PARTS=devices needs two. Without a device it says so.
# Where there is no .venv, $(PYTHON) as it is: machines with devices are often lent without a network.
gpu:
	PYTHONPATH=.:$(PYTHONPATH) $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py first_hour $(PARTS)

# The laws, and one world, trainer and process test of each method.
quick: $(STAMP)
	$(BIN)/python -m pytest -n $(shell getconf _NPROCESSORS_ONLN) -m quick

lint: checks

checks: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lightning_decentral
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info

# torch on its own and first: pip then takes the pinned build that is at hand (often the CPU one) before anything asks for a newer one.
# Compiled is what is imported, when it first is: one file in four of what pip would compile, one after the other.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and $(OLD_PYTHON) or 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: some minutes the first time"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $(STAMP)
