# A kind node on Debian: the packages and files of kind's own base image, with Debian's containerd, runc and
# CNI plugins.
ARG DEBIAN
FROM ${DEBIAN}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      systemd systemd-sysv dbus bash ca-certificates curl jq procps mount util-linux kmod \
      conntrack iptables nftables iproute2 ethtool socat libseccomp2 \
      containerd runc containernetworking-plugins \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY kind/usr/local/bin/ /usr/local/bin/
COPY kind/kind/ /kind/
COPY kind/etc/ /etc/
COPY bin/ /usr/bin/
COPY manifests/ /kind/manifests/
COPY version /kind/version
# kind expects containerd in /usr/local/bin, plugins in /opt/cni/bin, and a systemd that starts little.
RUN chmod 755 /usr/local/bin/* /kind/bin /kind/bin/* \
 && find /etc/systemd/system /etc/containerd /etc/default /kind/manifests -type f -exec chmod 644 {} + \
 && for b in containerd ctr containerd-shim-runc-v2; do ln -sf /usr/bin/$b /usr/local/bin/$b; done \
 && mkdir -p /opt/cni/bin /etc/kubernetes/manifests \
 && for p in host-local loopback ptp portmap; do cp /usr/lib/cni/$p /opt/cni/bin/; done \
 && rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* \
      /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/basic.target.wants/* \
      /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* \
      /lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service \
 && echo ReadKMsg=no >> /etc/systemd/journald.conf \
 && ln -sf /lib/systemd/systemd /sbin/init \
 && systemctl enable kubelet.service containerd.service undo-mount-hacks.service \
 && systemctl mask systemd-binfmt.service \
 && ctr oci spec \
      | jq 'del(.process.rlimits) \
          | .hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}]' \
      > /etc/containerd/cri-base.json
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
