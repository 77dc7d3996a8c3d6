# Two commands matter: `make book` builds the site, `make test` runs everything.
# Each creates .venv on its own; git, make and Python 3.11 or 3.12 are enough.
#
#   PYTHON=/path/to/python3.12   the interpreter to build .venv with
#   CONSTRAINTS=                 the newest allowed versions instead of the pinned ones
#   PIP_FLAGS="..."              further options for pip, for example another index
#   JOBS=4                       workers of the test stages
#   PORT=8000                    where `make serve` listens

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
CONSTRAINTS ?= constraints.txt
PIP_FLAGS ?=
JOBS ?= 2
PORT ?= 8000

STAMP := $(VENV)/.installed
SITE := _build/html
STAGES := lint unit notebooks book site

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONNOUSERSITE := 1
# A kernel chooses its own backend; another one would leave the pages without pictures.
unexport MPLBACKEND

# An interpreter fits if it runs, is 3.11 or 3.12, and can make a virtual environment.
FITS := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

# A moved or copied environment points at the old place: build it again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

.PHONY: help book test serve refresh bench clean env FORCE $(STAGES)
.DEFAULT_GOAL := help
FORCE:

help:
	@echo "make book      build the site from the stored outputs; print where it is"
	@echo "make test      everything: $(STAGES), in this order (each is a target)"
	@echo "make serve     serve the built site on localhost"
	@echo "make refresh   re-execute the chapters and store their outputs"
	@echo "make bench     print the benchmark table"
	@echo "make clean     remove the site and the caches (.venv stays)"

env: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@set -e; found=; \
	if [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ] \
	   || ! $(BIN)/python -c '$(FITS)' 2>/dev/null; then \
	  IFS=:; \
	  for name in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3 python); do \
	    for dir in $(if $(findstring /,$(PYTHON)),/,$$PATH); do \
	      [ "$$dir" != "$(CURDIR)/$(BIN)" ] || continue; \
	      python=$(if $(findstring /,$(PYTHON)),"$$name","$$dir/$$name"); \
	      [ -x "$$python" ] && "$$python" -c '$(FITS)' >/dev/null 2>&1 || continue; \
	      found="$$python"; break 2; \
	    done; \
	  done; \
	  unset IFS; \
	  if [ -z "$$found" ]; then \
	    echo "make: found no Python 3.11 or 3.12 that runs and has venv and ensurepip." >&2; \
	    echo "make: install one (on Debian also python3-venv), or say PYTHON=/path/to/it" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$found"; \
	  rm -rf $(VENV); "$$found" -m venv $(VENV); \
	fi; \
	echo "Installing into $(VENV) (some minutes, once)"; \
	rm -f $(STAMP); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[book,test]'; \
	echo "$(CURDIR)" > $(STAMP)

book: $(STAMP)
	@rm -rf _build
	@$(BIN)/jupyter-book build . -W -n --keep-going --quiet
	@test -s $(SITE)/index.html || { echo "make book: no page was written" >&2; exit 1; }
	@echo "The site: file://$(CURDIR)/$(SITE)/index.html"

test: $(STAMP)
	@for stage in $(STAGES); do \
	  echo "== $$stage"; \
	  $(MAKE) --no-print-directory $$stage || \
	    { echo "make test: red at stage '$$stage'" >&2; exit 1; }; \
	done; echo "make test: green ($(STAGES))"

lint: $(STAMP)
	@$(BIN)/ruff check .

unit: $(STAMP)
	@OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest tests -q -n $(JOBS) --dist loadfile

notebooks: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --nbval --nbval-current-env \
	  --nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 120 \
	  -p no:cacheprovider -n $(JOBS) --dist loadfile chapters

site: $(STAMP) $(SITE)/index.html
	@$(BIN)/python -m pytest tests/test_site.py -q -m site -rs

$(SITE)/index.html:
	@$(MAKE) --no-print-directory book

serve: $(STAMP) $(SITE)/index.html
	@echo "http://127.0.0.1:$(PORT)/ (stop with Ctrl-C)"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

refresh: $(STAMP)
	@$(BIN)/python tools/notebooks.py refresh

bench: $(STAMP)
	@for script in $(filter-out benchmarks/timing.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

clean:
	@rm -rf _build build *.egg-info .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs rm -rf
