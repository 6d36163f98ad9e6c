.PHONY: golden control-plane
golden: setup ## write the operator's golden manifests anew; read the difference before you commit it
	KVPOOL_WRITE_GOLDEN=1 $(PY) -m pytest -q operator/tests -k as_reviewed

control-plane: setup ## the real operator against a real API server, without nodes (needs what make e2e builds; 7 min)
	$(PY) -m pytest e2e/control_plane --confcutdir=e2e/control_plane -n $(JOBS) --dist loadfile $(ARGS)
