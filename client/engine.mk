.PHONY: test-engine
test-engine: setup ## PoolTier inside a real vLLM on the CPU (about 6 GB of engine in the cache; 5 minutes)
	$(PY) -m pytest client/tests_engine --timeout 900 $(ARGS)
