# `make demo` and `make test` prepare the machine themselves, and say so before they do.

BIN := .venv/bin
PREPARE := scripts/prepare.sh
# Another Python of at least 3.11: make PYTHON=/usr/bin/python3 …
export PYTHON
# How many processes run the tests; 0: this one alone, as for `-s` and `--pdb`.
WORKERS := 2
# What boots a throw-away kernel with NVMe drives and runs a command there.
LAB := ../shared/lab/lab

.PHONY: help demo test test-lab power check lint types arch man bench install links uninstall clean distclean
.PHONY: prepare-run prepare-dev
.NOTPARALLEL:

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: prepare-run ## prepare the machine, mount, and put real K and V through it
	@$(BIN)/python -m demo $(ARGS)

test: prepare-dev ## prepare the machine and run the tests; ARGS="-k expiry" chooses, WORKERS=0 is one process
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-lab: prepare-dev ## the tests that need NVMe drives, on a kernel of their own; LAB= names the lab
	@$(BIN)/python -m tests.lab "$(LAB)" $(ARGS)

power: prepare-dev ## as root: 10 000 simulated power cuts, 10 000 flips, 1 000 kills; takes hours
	@CTXFS_POWER_CUTS=$${CTXFS_POWER_CUTS:-10000} CTXFS_POWER_FLIPS=$${CTXFS_POWER_FLIPS:-10000} \
		CTXFS_COLD_KILLS=$${CTXFS_COLD_KILLS:-500} $(BIN)/python -m pytest \
		tests/tiers/test_power_cuts.py tests/tiers/test_bit_flips.py \
		tests/mount/test_cold_kills.py $(ARGS)

check: lint types arch man test ## all that has to hold before a change goes in

lint: prepare-dev ## style and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: prepare-dev ## mypy, strict
	@$(BIN)/mypy

arch: prepare-dev ## who may import whom
	@$(BIN)/lint-imports --no-logo 2>&1

man: prepare-dev ## the manual pages are clean mdoc
	@for page in man/*.[1-8]; do \
		complaints=$$(groff -mdoc -ww -z "$$page" 2>&1) && [ -z "$$complaints" ] \
		|| { echo "$$page: $$complaints"; exit 1; }; \
	done

bench: prepare-dev ## measure beside tmpfs, the local file system and fio
	@$(BIN)/python -m bench $(ARGS)

install: prepare-run links ## prepare the machine, and link the commands into /usr/local

links: ## as root: the commands and manual pages in /usr/local, mount.ctxfs in /sbin
	@$(PREPARE) links

uninstall: ## take those links away again
	@$(PREPARE) unlink

prepare-run prepare-dev: prepare-%:
	@$(PREPARE) plan $*
	@$(PREPARE) packages $*
	@$(PREPARE) venv $*

clean: ## remove what tools left in the checkout
	@rm -rf build dist *.egg-info.tmp bench/results
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	@rm -rf .venv ctxfs.egg-info
