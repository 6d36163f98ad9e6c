.PHONY: soak
soak: setup ## the reference mix for minutes while things break at random (ARGS="--minutes=5"; out/soak.json)
	$(PY) -m bench.soak $(ARGS)

.PHONY: faults
faults: setup ## the faults that want repetition: 200 kills, 10,000 steps of a model, 10,000 spoiled blocks, 200,000 packets (30 minutes)
	KVPOOL_KILLS=200 KVPOOL_STEPS=10000 KVPOOL_SPOILED=10000 KVPOOL_PACKETS=100000 $(PY) -m pytest -q --timeout=3600 \
	  sidecar/tests/app/test_sc_faults_long.py sidecar/tests/app/test_sc_spoiled_blocks.py \
	  sidecar/tests/serving/test_sc_hostile.py::test_hostile_packets_on_a_pods_socket $(ARGS)
