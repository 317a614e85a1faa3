# make demo     two parameter servers and two trainers learn handwritten digits, on this machine
# make demo-clicks     MovieLens-100K on 2 servers and 2 trainers, of which one is killed, beside one process alone
# make test     the test suite: of every class of tests one or more, in some minutes; what fails runs once more at the end, alone
# make test-fast    without processes and without what takes long: in a minute; ARGS=--cov shows the coverage
# make bench    a table of ratios, each against something measured in the same run; ONLY=wire takes the rows named so, ONLY=gate those that a change of the engine can spoil, in ten minutes
# make mutants FILES='pserver/leases/*.py' TESTS=tests/pserver/leases     small faults of the product: which do these tests not see?
# make check-wheel     builds the sdist and the wheel, and runs the examples from the installed wheel
# make check-lowest check-newest     a chosen part of the tests with the oldest versions that pyproject.toml permits, and with the newest that there are; each in an environment of its own under build/, for some minutes after its downloads
# make check-image     builds the image and runs the demo in containers; needs docker or podman, with compose
# make check-history SEEDS=2000     is every step applied exactly once, whatever becomes of networks and trainers?  So many trials; docs/checks/history.md
# make fuzz SECONDS=60     wrong inputs for jobs in this process and on all ports of a server: the job's result stays, memory and times have bounds
# make docs     builds docs/ as a site into build/site; index.html is its first page
# make reference   writes those pages of docs/ that are made from the sources, and the types of a strategy's fields
# make pictures ONLY=modes     the pictures of docs/; without ONLY all of them, of which some are measured, for minutes
# make lint types check-protos     the other checks of CI (.ci/run runs them all)
# make protos   generates the protobuf code anew
#
# The complete matrices, of which `make test` takes a part.  An interrupted one goes on where it was; its table is docs/checks/NAME.md:
#   check-equalities   every optimizer, clip and schedule, on 1 to 3 servers, eagerly and as a program, against plain torch
#   check-lanes        what every lane promises: each mode, eagerly and as a program, of each model
#   check-pairs        every model with every optimizer, against plain torch; every model's life in every
#                      mode: resumed on other servers, evaluated, served by a process of its own
#   check-faults       every fault of the network in every mode over every transport, and every death
#                      and stop of a process in every mode and phase; what becomes of a job that loses a trainer
#   check-sharding     every model at every level of sharding, and in the directions for which it has parts
#   check-examples     every example in every mode, as processes
#   check-checkpoints  every optimizer with a table, saved and loaded on 0 to 3 servers
#   check-ablations    each rule of exactly-once, of leases, fences, cuts and waits, taken away: does the checker see it?
#   check-history      SEEDS=2000 random histories: is every step applied exactly once?
#   check-properties   what hypothesis draws: other examples in each run, and many
#   check-long         those tests that `make test` leaves out because others of their class stand for them
#   check-sample       SAMPLE=100 of all their combinations, others for each state of the source
#
# Each sets up what it needs, once: a virtual environment in .venv with the versions of constraints.txt.
# ARGS goes to the command: `make test ARGS=tests/transpiler`, `make demo ARGS=--program`.
# TORCH_INDEX_URL, where set, is a further index to look for torch in: https://download.pytorch.org/whl/cpu has smaller wheels, without CUDA.

# processes start twice as fast where our bytecode is kept
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
CHECKS = check-equalities check-lanes check-sharding check-examples check-checkpoints check-ablations
.PHONY: help demo demo-clicks test test-fast bench docs reference pictures lint types protos check-protos check-history check-sample check-properties check-long check-wheel check-lowest check-newest check-image check-faults check-pairs fuzz mutants clean $(CHECKS)

SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
    $$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt
TORCH_INDEX_URL ?=
ARGS ?=
SEEDS ?= 2000
SECONDS ?= 60
FILES ?=
TESTS ?=
COUNT ?= 300
# of pytest-xdist: where another worker takes the place of one that died, a run by files never ends
WORKERS = --max-worker-restart=0 -n
SAMPLE ?= 100
ONLY ?=
# where an old or a new library would show: imports, messages, streams, TLS, files, stores, kernels, metrics, and jobs of 2 x 2
VERSIONS = tests/test_floors.py tests/test_protos.py tests/test_protocol_transcripts.py \
    tests/test_transcripts.py::test_the_numbers_of_fields_stay_as_they_are tests/fuzz tests/trainer/test_import.py \
    tests/pserver/test_control.py tests/pserver/test_extras.py tests/pserver/security tests/pserver/transport \
    tests/conformance/test_transports.py tests/conformance/test_storage.py tests/pserver/storage tests/pserver/checkpoint \
    tests/pserver/telemetry tests/pserver/table tests/trainer/data tests/transpiler/formats \
    tests/transpiler/tracing/test_capture.py tests/transpiler/tracing/test_register_rule.py \
    tests/cluster/test_examples.py tests/cluster/test_jobs_with_keys.py tests/cluster/test_fleet_cluster.py
# aiobotocore[boto3]: the boto3 that fits beside s3fs, for moto
TEST_TOOLS = hypothesis psutil pytest pytest-randomly pytest-timeout pytest-xdist \
    'aiobotocore[boto3]' flask flask-cors 'moto[s3]'

help:
	@sed -n 's/^# //p; /^$$/q' Makefile

demo: .venv/.examples
	@echo "== 2 parameter servers and 2 trainers learn handwritten digits; each process also writes to logs/"
	@$(BIN)/pserver launch --servers 2 --trainers 2 trainer/examples/digits.py $(ARGS)
	@tail -n 1 logs/trainer-0.log

demo-clicks: .venv/.examples build/movielens/train.tsv
	@echo "== MovieLens-100K in one process alone, for half a minute"
	@OMP_NUM_THREADS=1 $(BIN)/python -m trainer.examples.movielens > build/movielens/alone.txt 2> build/movielens/alone.log \
	    || { cat build/movielens/alone.log; exit 1; }
	@echo "== 2 parameter servers and 2 trainers; trainer 1 is killed at its step 600, and started again"
	@rm -f build/movielens/killed
	@$(BIN)/pserver launch --servers 2 --trainers 2 --max-restarts 1 trainer/examples/movielens.py --batch 128 --kill-at 600 $(ARGS)
	@grep counted logs/trainer-0.log
	@echo "one process alone: $$(tail -n 1 build/movielens/alone.txt)"
	@tail -n 1 logs/trainer-0.log

build/movielens/train.tsv: | .venv/.examples
	@echo "== MovieLens-100K, from the package recbole"
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/movielens recbole==1.2.1
	@$(BIN)/python -m trainer.examples.click_files build/movielens

test: .venv/.dev
	@echo "== tests, four files at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --again $(WORKERS) 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: .venv/.dev
	@echo "== fast tests, two files at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --tier fast $(WORKERS) 2 --dist loadfile --no-loadscope-reorder -r fE $(ARGS)

$(CHECKS): .venv/.dev
	@echo "== the complete matrix of $(@:check-%=%), two combinations at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --check $(@:check-%=%) $(WORKERS) 2 -p no:randomly -r fE $(ARGS)

check-faults: .venv/.dev
	@echo "== the complete matrices of faults, of the network and of processes, two combinations at a time"
	@status=0; for check in faults process_faults trainer_faults random_faults; do \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest --check $$check $(WORKERS) 2 -p no:randomly -r fE $(ARGS) || status=1; \
	done; exit $$status

check-pairs: .venv/.dev
	@echo "== the complete matrices of models, optimizers, modes and strategies, two combinations at a time"
	@status=0; for check in pairs lives strategies; do \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest --check $$check $(WORKERS) 2 -p no:randomly -r fE $(ARGS) || status=1; \
	done; exit $$status

check-sample: .venv/.dev
	@echo "== $(SAMPLE) combinations of the matrices, three at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --check any --sample $(SAMPLE) --again $(WORKERS) 3 -r fE $(ARGS)

check-properties: .venv/.dev
	@echo "== property-based tests with 2,000 examples each, two files at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=search --timeout 600 $(WORKERS) 2 --dist loadfile -r fE $(ARGS)

check-long: .venv/.dev
	@echo "== tests that take long, three files at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --tier all -m long $(WORKERS) 3 --dist loadfile --no-loadscope-reorder -r fE $(ARGS)

bench: .venv/.dev
	@echo "== measuring, for some minutes"
	@$(BIN)/python tests/benchmarks --only '$(ONLY)' $(ARGS)

check-history: .venv/.dev
	@echo "== $(SEEDS) trials of trainers that come and go, servers and a faulty network"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.checker --seeds $(SEEDS) --record build/checks/history.jsonl --table docs/checks/history.md $(ARGS)

fuzz: .venv/.dev
	@echo "== wrong inputs for $(SECONDS) s"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

mutants: .venv/.dev
	@echo "== $(COUNT) mutants of $(FILES)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --files $(FILES) --tests $(TESTS) --count $(COUNT) $(ARGS)

docs: .venv/.docs
	@echo "== docs/ as a site: build/site/index.html"
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)
	@echo "open build/site/index.html as a file; or serve it on this host:"
	@echo "$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

reference: .venv/.dev
	@echo "== the pages of docs/ that are made from the sources"
	@$(BIN)/python -m docs.generators

pictures: .venv/.dev
	@echo "== the pictures of docs/"
	@status=0; for script in $$(grep -l __main__ docs/pictures/*$(ONLY)*.py); do \
	    echo "$$script"; OMP_NUM_THREADS=1 $(BIN)/python $$script $(ARGS) || status=1; \
	done; exit $$status

lint: .venv/.dev
	@echo "== ruff: lint and format"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .venv/.dev
	@echo "== mypy --strict"
	@$(BIN)/mypy

protos: .venv/.dev
	@echo "== generating protobuf code"
	@PYTHON="$(CURDIR)/$(BIN)/python" protos/generate

check-protos: .venv/.dev
	@echo "== is the committed protobuf code what protos/ generates?"
	@$(BIN)/python -m pytest -q tests/test_protos.py

check-wheel: .venv/.dev
	@echo "== what is installed is whole: sdist, wheel, examples"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --tier all -q tests/docs/test_wheel.py $(ARGS)

check-lowest check-newest: check-%: build/%/.installed
	@echo "== a part of the tests, with the $* versions that pyproject.toml permits"
	@OMP_NUM_THREADS=1 build/$*/bin/python -m pytest -q $(VERSIONS) $(ARGS)

check-image: .venv/.dev
	@echo "== the image: built, measured, and the demo run in containers; for some minutes"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --tier all tests/deploy tests/pserver/launcher/manifests $(ARGS)

clean:
	rm -rf .venv build logs *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: expected Python 3.11, 3.12 or 3.13 on the PATH, found none; or say make PYTHON=..." >&2; exit 1; }
	@echo "== a virtual environment in .venv, with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# Torch by itself, because it may come from an index of its own.
.venv/.torch: constraints.txt | $(BIN)/python
	@echo "== torch (the largest download by far)"
	@$(PIP) $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) torch
	@touch $@

.venv/.examples: pyproject.toml constraints.txt .venv/.torch
	@echo "== pserver, and what its examples need"
	@$(PIP) -e '.[examples]'
	@touch $@

.venv/.docs: pyproject.toml constraints.txt .venv/.torch
	@echo "== pserver, and what builds its documentation"
	@$(PIP) -e '.[docs]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt .venv/.torch
	@echo "== pserver, and what its tests and checks need"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.examples .venv/.docs

build/lowest/bin/python build/newest/bin/python:
	@test -n "$(PYTHON)" || { echo "make: expected Python 3.11, 3.12 or 3.13 on the PATH, found none; or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(@:%/bin/python=%)

INTO = build/$*/bin/python -m pip install --disable-pip-version-check --no-input $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
# The newest are looked for each time.
.PHONY: build/newest/.installed
build/lowest/.installed: CHOICE = -c build/lowest/floors.txt
build/newest/.installed: CHOICE = --upgrade --upgrade-strategy eager
build/lowest/.installed build/newest/.installed: build/%/.installed: pyproject.toml | build/%/bin/python
	@echo "== pserver with the $* versions of its dependencies, in build/$*: torch with CUDA downloads up to 3 GB and takes 7,"
	@echo "   without CUDA a tenth: make check-$* TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu"
	@$(INTO) packaging
	@build/$*/bin/python -m tests.support.floors > build/$*/floors.txt
	@$(INTO) $(CHOICE) torch
	@$(INTO) $(CHOICE) $(TEST_TOOLS) -e '.[disk,examples,s3,tensorboard]'
	@touch $@
