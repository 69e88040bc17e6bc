# The two commands of the README, and what is needed while working. Each sets up first; where nothing changed, that
# takes no time.
.PHONY: demo demo-vision experiment test test-all test-free-threaded lint format bench dist docs setup clean

demo: setup
	@.venv/bin/python -m examples.demo

demo-vision: setup
	@.venv/bin/python -m examples.demo --vision

experiment: setup
	@.venv/bin/python -m examples.elastic_training

test:
	@scripts/test

test-all:
	@TEST_DEPTH=5 scripts/test --numprocesses=2 --dist=worksteal -m ""

test-free-threaded:
	@scripts/test-free-threaded

lint: setup
	@scripts/lint

format: setup
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .

bench: setup
	@.venv/bin/python -m benchmarks.run compare

dist: setup
	@scripts/dist

docs: setup
	@scripts/docs

setup:
	@scripts/setup

clean:
	rm -rf .venv .tools .zephon dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
