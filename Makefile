# Every command of the bundle. `make` alone lists them. Defaults (environment, rung, corpus) stand in settings.ini.
.PHONY: help replay test lint lock fetch clean edit fold export bench plan serve serve-env serving-if-it-fits eval-env dev train
.DEFAULT_GOAL := help

FOUND := $(shell sh tools/python.sh $(PYTHON))
ifeq ($(FOUND),)
$(error no working Python >= 3.11 and < 3.14 found$(if $(PYTHON), at $(PYTHON)); install one, or name it: make replay PYTHON=/path/to/python3)
endif
ENV := $(FOUND) tools/environment.py
BIN := $(shell $(ENV) path)/bin
LADDERBOOK := $(BIN)/ladderbook

help: ## this list, and which Python was found
	@echo "Python: $(FOUND)"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

replay: train ## environment, corpus, smallest desk rung, its export, summary   [RUNG=desk-64 SEED=0 OFFLINE=DIR]
	@$(LADDERBOOK) plan $(RUNG) > /dev/null
	@$(LADDERBOOK) data build $(if $(OFFLINE),--source-dir "$(OFFLINE)/sources")
	@$(LADDERBOOK) replay $(RUNG) $(if $(SEED),--seed $(SEED)) --export --yes

test: dev serving-if-it-fits lint ## everything that is promised, proved: lint, every notebook, every test
	@$(BIN)/python -m pytest $(ARGS)

lint: dev ## style, notebooks exported and clean, README in step, nothing unused
	@$(BIN)/python tools/lint.py

lock: dev ## resolve the locks again [UPGRADE=1 for the newest of everything]; lists run identities that change
	@$(BIN)/python tools/lock.py $(if $(UPGRADE),--upgrade)

fetch: train ## wheels and sources into DIR with a manifest, for `make replay OFFLINE=DIR`
	@$(BIN)/python tools/offline.py "$(DIR)"

edit: dev ## a notebook as text   NB=recipe/01_spec
	@$(BIN)/python tools/notebooks.py edit "$(NB)"

fold: dev ## the text back into its notebook: export, run, clean   NB=recipe/01_spec
	@$(BIN)/python tools/notebooks.py fold "$(NB)"

export: dev ## every notebook into the package, index.ipynb into README.md
	@$(BIN)/python tools/notebooks.py export

plan: train ## shapes, parameters, FLOPs, memory of a rung, on paper   [RUNG=desk-64]
	@$(LADDERBOOK) plan $(RUNG)

bench: dev ## speed against a peer and against earlier, recorded under artifacts/benchmarks/
	@$(BIN)/python -m tests.bench $(ARGS)

clean: ## what could be removed and how much it is; removes it with YES=1, runs too with RUNS=1
	@$(FOUND) tools/clean.py $(if $(YES),--yes) $(if $(RUNS),--runs)

serve: train serve-env ## the export of a finished run at an OpenAI-compatible address   [RUN=desk-64-0]
	@$(LADDERBOOK) serve $(or $(RUN),desk-64-0)

# Where no serving environment can be, its tests say so; any other failure to make it is a failure.
serving-if-it-fits:
	@$(ENV) serve --if-it-fits

serve-env: ## the serving environment (stock vLLM on the CPU), for `ladderbook serve`, `parity`
	@$(ENV) serve

eval-env: dev ## lm-eval beside the training side, for `ladderbook eval --harness`

# the environments that the commands above need
train:
	@$(ENV) train $(if $(OFFLINE),--offline "$(OFFLINE)")

dev:
	@$(ENV) dev
