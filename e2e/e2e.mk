.PHONY: e2e
e2e: setup ## the whole path on a real kind cluster with real vLLM (KEEP=1 keeps the cluster)
	e2e/run.sh $(ARGS)
