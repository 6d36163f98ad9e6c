.PHONY: chart-check
chart-check: ## what helm lint and kube-score find in the chart (needs helm, and Go the first time)
	charts/score.sh
