# The tools live apart: they ask PyPI, and nothing else here needs them.
AUDIT := $(KVPOOL_CACHE)/audit-$(shell cksum requirements/audit.txt 2>/dev/null | cut -d' ' -f1)
# one at a time: several clones share the cache
AUDIT_TOOLS = mkdir -p $(KVPOOL_CACHE) && flock $(KVPOOL_CACHE)/audit.lock sh -c '[ -x $(AUDIT)/bin/pip-audit ] || \
  { rm -rf $(AUDIT) && $(BASE_PYTHON) -m venv $(AUDIT) && timeout 300 $(AUDIT)/bin/pip install -q --retries 1 --timeout 20 \
    --disable-pip-version-check --no-deps --require-hashes -r requirements/audit.txt; } || \
  { rm -rf $(AUDIT); echo "the tools of requirements/audit.txt cannot be had"; false; }'

.PHONY: sbom audit
sbom: setup ## bills of materials of the images (CycloneDX) in out/sbom
	$(PY) -m supply.sbom out/sbom

# Without PyPI there are neither tools nor advisories: said, not failed.
audit: sbom ## known vulnerabilities of what the images install; those of supply/accepted.toml are let pass
	@{ $(AUDIT_TOOLS); } || { echo "audit: so NOTHING IS KNOWN about vulnerabilities"; exit 0; }; \
	  $(AUDIT)/bin/python supply/valid.py out/sbom/*.cdx.json && $(PY) -m supply.audit $(AUDIT)/bin/pip-audit
