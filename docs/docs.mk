# The documentation site. Its tools live apart from .venv, in the cache, one environment for each lock file.
DOCS_VENV := $(KVPOOL_CACHE)/docs-$(shell cksum requirements/docs.txt 2>/dev/null | cut -d' ' -f1)
DOCS_NODE := $(KVPOOL_CACHE)/docs-node-$(shell cksum docs/tools/package-lock.json 2>/dev/null | cut -d' ' -f1)
DOCS_ROOT_PAGES := README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md examples/README.md examples/demo/README.md \
  charts/kvpool/README.md cli/README.md client/README.md operator/README.md sidecar/README.md e2e/airgap/README.md
DOCS_PORT ?= 8000
# without the announcements of MkDocs and Material: this mkdocs.yml builds with the successor Zensical too
export NO_MKDOCS_2_WARNING := 1
# cspell and D2 need Node.js 20 or newer; 1 makes their absence an error
DOCS_NODE_REQUIRED ?=

.PHONY: docs docs-serve docs-version docs-tools docs-spelling drawings
docs: docs-tools ## build the site strictly into out/site; check links, spelling, style and drawings (30 s)
	@rm -rf out/site
	$(DOCS_VENV)/bin/mkdocs build --quiet --strict
	$(DOCS_VENV)/bin/python docs/tools/offline.py out/site
	$(DOCS_VENV)/bin/python docs/tools/drawings.py
	$(DOCS_VENV)/bin/python docs/tools/style.py
	$(DOCS_VENV)/bin/lychee --offline --include-fragments --no-progress --quiet --root-dir "$$PWD/out/site" --index-files index.html out/site
	$(DOCS_VENV)/bin/lychee --offline --include-fragments --no-progress --quiet $(DOCS_ROOT_PAGES)
	$(DOCS_VENV)/bin/codespell --ignore-regex '[A-Z][a-z]+([A-Z][a-z]+)+' --skip 'docs/tools/package-lock.json,*.svg' docs $(DOCS_ROOT_PAGES)
	@$(MAKE) --no-print-directory docs-spelling

docs-serve: docs-tools ## serve the site at http://127.0.0.1:8000 and rebuild it on changes (DOCS_PORT=...)
	$(DOCS_VENV)/bin/mkdocs serve --dev-addr 127.0.0.1:$(DOCS_PORT)

docs-version: docs-tools ## commit the site of VERSION=x.y to the local branch gh-pages, as `latest` (mike)
	@[ -n "$(VERSION)" ] || { echo "usage: make docs-version VERSION=x.y"; exit 2; }
	PATH="$(DOCS_VENV)/bin:$$PATH" $(DOCS_VENV)/bin/mike deploy --update-aliases $(VERSION) latest

docs-tools: $(DOCS_VENV)/.ready
$(DOCS_VENV)/.ready:
	@mkdir -p $(KVPOOL_CACHE) && flock $(KVPOOL_CACHE)/docs.lock sh -c '[ -f $@ ] || { rm -rf $(DOCS_VENV) && \
	  $(BASE_PYTHON) -m venv $(DOCS_VENV) && $(DOCS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps \
	  --require-hashes -r requirements/docs.txt && touch $@; }'

# $(call with_node,command): run a command with the Node.js tools, or give the reason why it is skipped
define with_node
{ node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 20 ? 0 : 1)' 2>/dev/null || \
    { echo "$@: skipped, Node.js 20 or newer is not installed"; false; }; } && \
{ mkdir -p $(KVPOOL_CACHE) && flock $(KVPOOL_CACHE)/docs-node.lock sh -c '[ -f $(DOCS_NODE)/.ready ] || { rm -rf $(DOCS_NODE) && \
    mkdir -p $(DOCS_NODE) && cp docs/tools/package.json docs/tools/package-lock.json docs/tools/.npmrc $(DOCS_NODE)/ && \
    cd $(DOCS_NODE) && npm ci --ignore-scripts --silent && touch .ready; }' || \
    { echo "$@: skipped, the packages of docs/tools/package-lock.json cannot be installed"; false; }; }
endef

docs-spelling:
	@if $(with_node); then \
	  $(DOCS_NODE)/node_modules/.bin/cspell lint --no-progress --no-summary --config docs/tools/cspell.json 'docs/**/*.md' $(DOCS_ROOT_PAGES); \
	else [ -z "$(DOCS_NODE_REQUIRED)" ]; fi

drawings: ## regenerate docs/assets/*.svg from docs/drawings/*.d2 (Node.js 20 or newer)
	@if $(with_node); then node docs/tools/draw.mjs $(DOCS_NODE)/node_modules; else false; fi
