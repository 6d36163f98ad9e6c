.PHONY: test-engines
test-engines: setup ## the plug-ins inside real engines on the CPU (about 6 GB of engine in the cache)
	client/tests_engine/tools.sh
	$(PY) -m pytest client/tests_engine --timeout 900 $(ARGS)
