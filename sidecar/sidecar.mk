.PHONY: test-drain
test-drain: setup ## drains of real sidecars, nodes that are lost and come back (30 s)
	$(PY) -m pytest sidecar/tests_nodes $(ARGS)
