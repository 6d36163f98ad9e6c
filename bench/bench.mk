.PHONY: bench
bench: setup ## the data path beside the limit of this machine, with ratios (1 to 2 minutes; out/bench/data.json)
	$(PY) -m bench $(ARGS)
