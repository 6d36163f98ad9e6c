.PHONY: chart-check
chart-check: setup ## what helm lint and kube-score find in the chart, and whether its PromQL is (needs helm, and Go the first time)
	charts/score.sh
	@$(AUDIT_TOOLS)
	$(AUDIT)/bin/python charts/promql.py
