# One way to do each thing; `make help` lists them.
.DEFAULT_GOAL := help
RUN := .venv/bin
SEED ?= 0

.PHONY: help setup demo images stack test check lint bench chaos-sandbox chaos-stack clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: ## make .venv and start a Docker engine (idempotent)
	@scripts/setup.sh
	@docker/engine.sh

demo: setup ## train the tiny policy end to end on this machine, without a GPU (SEED=0)
	$(RUN)/agent-r3 tasks build --for configs/tiny-cpu.yaml
	$(RUN)/agent-r3 model tiny
	$(RUN)/agent-r3 train configs/tiny-cpu.yaml run.seed=$(SEED) --overwrite

images: ## build the images of the docker-compose stack (IMAGES="rollout broker" for some)
	@docker/engine.sh
	@scripts/images.sh $(IMAGES)

test: setup ## lint, types, layers and every test, against real Docker, Redis, SGLang and Megatron
	@scripts/test-services.sh
	@scripts/docker-plugins.sh
	@$(MAKE) --no-print-directory lint
	@scripts/tests.sh

check: test ## the same under its usual name

lint: ## ruff, mypy strict, import-linter
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

stack: setup ## build all that the docker-compose stack needs, and bring it up (docs/stack.md)
	$(RUN)/agent-r3 tasks build --for configs/stack-cpu.yaml
	$(RUN)/agent-r3 model tiny
	@scripts/images.sh
	@scripts/stack-secrets.sh
	docker compose up --wait

bench: setup ## every benchmark, as JSON lines
	$(RUN)/agent-r3 bench r3 --json
	$(RUN)/agent-r3 bench sandbox --json
	$(RUN)/agent-r3 bench eval --json

chaos-sandbox: setup ## 200 episodes while containers, a private engine and workers are killed (SEED=0, needs root)
	$(RUN)/python -m tests.chaos --seed $(SEED)

chaos-stack: setup ## 8 steps of a stack of its own while each service is killed and a worker cut off (SEED=0, needs root)
	$(RUN)/agent-r3 tasks build --for configs/stack-cpu.yaml
	$(RUN)/agent-r3 model tiny
	@AGENT_R3_TAG=tests scripts/images.sh
	$(RUN)/python -m tests.stack.chaos --seed $(SEED)

clean: ## remove runs and caches of this checkout
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
