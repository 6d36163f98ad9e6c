.PHONY: soak
soak: setup ## the reference mix for minutes while things break at random (ARGS="--minutes=5"; out/soak.json)
	$(PY) -m bench.soak $(ARGS)

.PHONY: faults
faults: setup ## the faults that want repetition: 200 kills during writes, 10,000 steps of a model (5 to 20 minutes)
	KVPOOL_KILLS=200 KVPOOL_STEPS=10000 $(PY) -m pytest -q --timeout=3600 sidecar/tests/app/test_sc_faults_long.py $(ARGS)
