#!/bin/bash
# Build binaries from Go modules: binaries.sh NAME... prints the folder that holds them.
# NAME: kube (every Kubernetes binary of a node, kubectl, the pod network, crictl), coredns, etcd, pause,
# runc-fit, kind, helm; kubectl alone where no node image is wanted.
# A binary appears under its name only when it is complete, so an interrupted build goes on where it stopped.
. "$(dirname "$(readlink -f "$0")")/lib.sh"
cd "$AIRGAP"

sources=$({
  cat go.mod go.sum binaries.sh
  find cmd internal -name '*.go' -print0 | sort -z | xargs -0 cat
} | hash)
BIN=$KEEP/bin-$sources

package() {
  case $1 in
    kube | coredns | pause | runc-fit) echo "./cmd/$1" ;;
    kind) echo sigs.k8s.io/kind ;;
    etcd) echo go.etcd.io/etcd/server/v3 ;;
    helm) echo helm.sh/helm/v3/cmd/helm ;;
    kubectl) echo k8s.io/kubernetes/cmd/kubectl ;;
    *) die "no binary is named $1" ;;
  esac
}

# Kubernetes binaries refuse to work with each other without a version; helm's charts ask for one.
stamps() {
  local major minor p
  IFS=. read -r major minor _ <<<"${K8S_VERSION#v}"
  case $1 in
    kube | kubectl)
      for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        printf -- '-X %s.gitVersion=%s -X %s.gitMajor=%s -X %s.gitMinor=%s -X %s.gitTreeState=clean ' \
          "$p" "$K8S_VERSION" "$p" "$major" "$p" "$minor" "$p"
      done ;;
    helm)
      printf -- '-X helm.sh/helm/v3/internal/version.version=%s ' "$(module_version helm.sh/helm/v3)"
      for p in helm.sh/helm/v3/pkg/{lint/rules,chartutil}; do
        printf -- '-X %s.k8sVersionMajor=%s -X %s.k8sVersionMinor=%s ' "$p" "$major" "$p" "$minor"
      done ;;
  esac
}

build() {
  [ "$1" != kube ] || { go vet ./internal/... && go test ./internal/...; } || return
  go build -trimpath -ldflags "-s -w $(stamps "$1")" -o "$BIN/.$1.partial" "$(package "$1")"
  mv "$BIN/.$1.partial" "$BIN/$1"
  [ "$1" = kube ] || return 0
  for name in kubeadm kubelet kubectl crictl podnet kube-{apiserver,controller-manager,scheduler,proxy}; do
    ln -sfn kube "$BIN/$name"
  done
}

lock
mkdir -p "$BIN"
for name in "$@"; do
  [ -x "$BIN/$name" ] && continue
  command -v go >/dev/null || die "building $name needs Go 1.24 or newer"
  step "building $name" build "$name"
done
# those of older sources go, unless a cluster may still be using them
find "$KEEP" -maxdepth 1 -name 'bin-*' ! -path "$BIN" -mtime +1 -exec rm -rf {} +
echo "$BIN"
