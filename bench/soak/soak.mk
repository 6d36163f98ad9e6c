.PHONY: soak
soak: setup ## the reference mix for minutes while things break at random (ARGS="--minutes=5"; out/soak.json)
	$(PY) -m bench.soak $(ARGS)
