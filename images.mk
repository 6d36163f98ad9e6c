.PHONY: images
images: setup ## build the operator's and the sidecar's image (BASE_IMAGE=, REGISTRY=, RDMA=1, S3=1, INDEX_TLS=1; needs docker)
	BASE_IMAGE=$(BASE_IMAGE) REGISTRY=$(REGISTRY) RDMA=$(RDMA) S3=$(S3) INDEX_TLS=$(INDEX_TLS) images/build.sh

.PHONY: arm64-check
arm64-check: setup ## wheels for arm64, and the modules and the index server on an emulated arm64 (1 min; no docker)
	@images/arm64-check.sh || { status=$$?; [ $$status = 3 ] || exit $$status; }
