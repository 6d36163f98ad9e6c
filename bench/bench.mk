.PHONY: bench
bench: setup ## the data path beside the limit of this machine, with ratios (about 1 minute; out/bench/data.json)
	$(PY) -m bench $(ARGS)
