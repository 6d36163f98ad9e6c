LEVELS ?= smoke
.PHONY: e2e e2e-full airgap-test
e2e: setup ## the whole path on a real kind cluster with real vLLM (LEVELS="smoke or full"; KEEP=1 keeps the cluster)
	LEVELS="$(LEVELS)" e2e/run.sh $(ARGS)

e2e-full: setup ## all cases on kind, those that break nodes and leaders, too; the operator is away for ten minutes
	LEVELS="smoke or full or disruptive" KVPOOL_E2E_ABSENT_S=$(or $(KVPOOL_E2E_ABSENT_S),600) KVPOOL_E2E_HOT_MIB=1024 KVPOOL_E2E_HOSTILE_S=$(or $(KVPOOL_E2E_HOSTILE_S),600) e2e/run.sh $(ARGS)

airgap-test: ## our own Go programs of the nodes: vet and tests (a build of the node image runs them too)
	. e2e/airgap/lib.sh && cd e2e/airgap && go vet ./internal/... && go test ./internal/...
