.PHONY: bench
bench: setup ## a measurement beside the limit of this machine, with ratios (BENCH=data; ARGS=--help; out/bench/*.json)
	$(PY) -m bench $(or $(BENCH),data) $(ARGS)
