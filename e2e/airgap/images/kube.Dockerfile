# What the control plane and the network of a node run. Every Kubernetes component is the same image, as
# static pods name their command; the others differ in their entry point. A node unpacks only what it starts.
ARG DEBIAN
FROM ${DEBIAN} AS kube
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends conntrack iptables nftables \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY kube/ /usr/local/bin/

FROM kube AS podnet
ENTRYPOINT ["/usr/local/bin/podnet"]

FROM ${DEBIAN} AS etcd
COPY etcd /usr/local/bin/

FROM ${DEBIAN} AS coredns
COPY coredns /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/coredns"]
