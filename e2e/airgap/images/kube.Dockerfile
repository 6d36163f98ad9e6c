# What the control plane and the network of a node run, all in one image: static pods name their command,
# the other two differ in their entry point.
ARG DEBIAN
FROM ${DEBIAN} AS components
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends conntrack iptables nftables \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY bin/ /usr/local/bin/

FROM components AS coredns
ENTRYPOINT ["/usr/local/bin/coredns"]

FROM components AS podnet
ENTRYPOINT ["/usr/local/bin/podnet"]
