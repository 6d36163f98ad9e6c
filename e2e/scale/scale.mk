.PHONY: scale
scale: setup ## the operator with 200 played nodes, 500 pools, 5,000 pods: times, memory, requests (as root; 10 min)
	e2e/scale/run.sh $(ARGS)
