# Two commands from a bare clone: `make demo` and `make test`. Both make the virtual environment first.
# `make quick` takes a minute, `make test` eight, `make test-all` half an hour.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# With it, each of the many processes of a test compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE
# torch first and by its exact version: an open range would fetch gigabytes of CUDA packages.
TORCH = $(shell grep '^torch==' constraints.txt)

# Parts of clusters that tests run for real; without one, its tests are skipped and say so.
PARTS = etcd-server etcd-client slurmctld slurmd slurm-client munge openmpi-bin mpich openssh-server openssh-client \
    nftables iproute2 util-linux procps

.PHONY: venv demo torchrec parts test test-all test-costs lint types docs unit thorough quick attack fuzz simulate bench gpu clean

venv: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat \
	    -c constraints.txt -e '.[examples,dev,dev-k8s]'
	touch $@

demo: venv
	$(BIN)/fleetrun --server_num=1 --trainer_num=2 trainers/examples/parameter_server_trainer.py
	$(BIN)/fleetrun --nproc_per_node 2 trainers/examples/collective_trainer.py

# For the tests of TorchRec's modules, which are skipped without it.
torchrec: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$($(BIN)/python -c "import \
	    tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['torchrec'])")

# RUNLEVEL=1: packages do not start their services.
parts:
	apt-get update -qq
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(PARTS)

# tests/docs/test_site.py builds the site, as `make docs` does.
test: venv lint types unit

test-all: test thorough

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

# Warnings are errors, but not with --quiet, which also hides them. The variable spares the reader an advertisement.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Most tests wait for real processes. Each file runs in one worker, in the order of tests/conftest.py.
PYTEST = $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

unit: venv
	$(PYTEST) -m "not thorough" --costs imports

# Attacks, clusters, full disks, long jobs.
thorough: venv
	$(PYTEST) -m thorough

# The tests of `unit`, with what each file costs. Fails if a group costs a fifth more than tests/costs.json allows.
test-costs: venv
	$(PYTEST) -q -m "not thorough" --costs check

# Before each commit: all but the tests that are marked slow.
quick: venv
	$(PYTEST) -q -m "not slow and not thorough"

# Random kills, failing disks, damaged files, suspended processes, strangers, signals: for so many minutes.
# KIND=kills SEED=17 MINUTES=0 repeats one strike.
MINUTES ?= 2
KIND ?= attack
attack: venv
	ATTACK_SEED=$(SEED) $(BIN)/pytest tests/attack --minutes $(MINUTES) -k $(KIND) -q -s -o faulthandler_timeout=0

# Random programs, with fleet and with plain torch: for so many minutes. SEED=17 repeats those of one seed.
fuzz: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.equivalence.run --minutes $(MINUTES) $(if $(SEED),--seeds $(SEED))

# Simulated jobs of parameter servers with faults: for so many minutes, from FIRST on, up to the first violation.
# SEED=17 prints the history of one, WITHOUT=disk,shrink leaves faults and features out.
simulate: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_ps.run --minutes $(MINUTES) \
		$(if $(FIRST),--first $(FIRST)) $(if $(SEED),--seed $(SEED)) $(if $(WITHOUT),--without $(WITHOUT))

bench: venv
	$(BIN)/python bench/launch.py

# On a machine with an NVIDIA GPU and torch for CUDA: tests and measurements, in six minutes.
gpu: venv
	$(BIN)/python bench/gpu.py

clean:
	rm -rf $(VENV) build dist *.egg-info log
