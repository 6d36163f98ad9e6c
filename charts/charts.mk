.PHONY: chart-check
chart-check: setup ## helm lint and kube-score on the chart; PromQL, alerts and dashboards with a real Prometheus (needs helm, and Go the first time)
	charts/score.sh
	@$(AUDIT_TOOLS)
	$(AUDIT)/bin/python charts/promql.py
	tools=$$(charts/prometheus.sh) && "$$tools/promtool" check rules --lint=all charts/kvpool/files/alerts.yaml && \
	  "$$tools/promtool" test rules charts/alert_tests/*.yaml && \
	  PATH="$$tools:$$PATH" $(PY) -m pytest -q -n 0 sidecar/tests/observability/test_sc_dashboards.py
