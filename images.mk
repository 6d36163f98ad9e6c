.PHONY: images
images: setup ## build the operator's and the sidecar's image (BASE_IMAGE=, REGISTRY=, RDMA=1, S3=1, INDEX_TLS=1; needs docker)
	BASE_IMAGE=$(BASE_IMAGE) REGISTRY=$(REGISTRY) RDMA=$(RDMA) S3=$(S3) INDEX_TLS=$(INDEX_TLS) images/build.sh
