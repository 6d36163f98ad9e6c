# The tools live apart: they ask PyPI, and nothing else here needs them.
AUDIT := $(KVPOOL_CACHE)/audit-$(shell cksum requirements/audit.txt 2>/dev/null | cut -d' ' -f1)
# one at a time: several clones share the cache
AUDIT_TOOLS = mkdir -p $(KVPOOL_CACHE) && flock $(KVPOOL_CACHE)/audit.lock sh -c '[ -x $(AUDIT)/bin/pip-audit ] || \
  { rm -rf $(AUDIT) && $(BASE_PYTHON) -m venv $(AUDIT) && timeout 300 $(AUDIT)/bin/pip install -q --retries 1 --timeout 20 \
    --disable-pip-version-check --no-deps --require-hashes -r requirements/audit.txt; } || \
  { rm -rf $(AUDIT); echo "the tools of requirements/audit.txt cannot be had"; false; }'

.PHONY: sbom audit release-check
release-check: sbom ## wheels, versions, the chart's package and the workflows, as a release has them; publishes nothing
	@mkdir -p out/release
	$(PY) -m supply.release out/release
	@if command -v helm >/dev/null; then helm package -d out/release charts/kvpool; else echo "release: no helm on PATH: the chart is not packaged"; fi
	@if command -v actionlint >/dev/null; then actionlint && echo "release: the workflows are valid (actionlint)"; \
	  else echo "release: no actionlint on PATH: the workflows are not checked"; fi

sbom: setup ## bills of materials of the images (CycloneDX) in out/sbom
	$(PY) -m supply.sbom out/sbom

# Without PyPI there are neither tools nor advisories: said, and failed when it lasts (supply/audit.py).
# ADVISORIES=FILE: advisories for such places, in the form of supply/advisories.py. AUDIT_MAX_DAYS: how long silence may last.
audit: sbom ## known vulnerabilities of what the images install; those of supply/accepted.toml are let pass (ADVISORIES=)
	@tool=$(AUDIT)/bin/pip-audit; { $(AUDIT_TOOLS); } || tool=; \
	  [ -z "$$tool" ] || $(AUDIT)/bin/python supply/valid.py out/sbom/*.cdx.json && \
	  ADVISORIES=$(ADVISORIES) AUDIT_MAX_DAYS=$(AUDIT_MAX_DAYS) $(PY) -m supply.audit "$$tool"
