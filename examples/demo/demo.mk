ENGINE ?= vllm
.PHONY: demo
demo: setup ## sessions that move between three nodes on this machine, with a real engine (ENGINE=replay: without one)
	@environment=; if [ "$(ENGINE)" = vllm ]; then environment="--environment=$$(e2e/engine/make.sh)" || exit 1; fi; \
	PYTHONPATH=examples/demo exec $(PY) -m kvpool_demo --engine=$(ENGINE) $$environment $(ARGS)
