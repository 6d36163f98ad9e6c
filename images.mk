.PHONY: images
images: setup ## build the operator's and the sidecar's image (BASE_IMAGE=, REGISTRY=; needs docker)
	BASE_IMAGE=$(BASE_IMAGE) REGISTRY=$(REGISTRY) images/build.sh
