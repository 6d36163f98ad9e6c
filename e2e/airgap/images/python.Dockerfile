# Base of the operator's and the sidecar's image, and the image of engine pods whose Python environment is
# mounted: Debian's Python with pip, and the libraries that vLLM's and PyTorch's CPU wheels load.
ARG DEBIAN
FROM ${DEBIAN}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates python3 python3-pip libgomp1 libnuma1 libstdc++6 libtcmalloc-minimal4 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 # an image is one application's own environment, so pip may install into it
 && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \
 && ln -sf python3 /usr/bin/python
