#!/bin/bash
# Make the kind node image without an image registry, and print its name: Debian packages, kind's own files
# out of its Go module, Kubernetes built from Go modules, and inside it the images that a node starts.
# Follows `kind build node-image`, which itself needs a newer containerd than Debian's. After base-image.sh.
. "$(dirname "$(readlink -f "$0")")/lib.sh"

BIN=$("$AIRGAP/binaries.sh" kube coredns etcd pause)
lock
made=$({
  basename "$BIN"
  cat "$0" "$AIRGAP"/images/{kube,node}.Dockerfile
  image_id "$PYTHON_IMAGE"
} | hash)
if [ "$(made_from "$NODE_IMAGE")" = "$made" ]; then
  echo "$NODE_IMAGE"
  exit
fi
command -v go >/dev/null || die "making the node image needs Go 1.24 or newer"
(cd "$AIRGAP" && go mod download sigs.k8s.io/kind)
KIND=$(cd "$AIRGAP" && go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
WORK=$KEEP/node-image.partial
NODE_BASE=kvpool-local/node-base:$K8S_VERSION
container=kvpool-node-image
clean() {
  rm -rf "$WORK"
  docker rm -f -v "$container" >/dev/null 2>&1 || true # absent, mostly
}
clean # what an interrupted run left
trap clean EXIT

# Image names stand in kubeadm and in kind; none is written down here.
constant() { sed -n "s/^const $1 = \"\(.*\)\"/\1/p" "$KIND/pkg/build/nodeimage/$2"; }
control_plane=$("$BIN/kube" kubeadm config images list --kubernetes-version "$K8S_VERSION" 2>/dev/null)
dns=$(grep /coredns: <<<"$control_plane")
network=$(constant kindnetdImage const_cni.go)
pause=$(sed -n 's/.*sandbox_image = "\(.*\)".*/\1/p' "$KIND/images/base/files/etc/containerd/config.toml")
components=$(grep -Ev '/(coredns|pause):' <<<"$control_plane")
for name in "$dns" "$network" "$pause"; do
  [ -n "$name" ] || die "kind $KIND_VERSION names its images otherwise"
done

component_images() {
  local context=$WORK/kube name stage
  mkdir -p "$context/kube"
  cp "$BIN/kube" "$context/kube/"
  for name in podnet kube-{apiserver,controller-manager,scheduler,proxy}; do
    ln -s kube "$context/kube/$name"
  done
  cp "$BIN"/{etcd,coredns} "$context/"
  for name in $components $dns $network; do
    case $name in
      "$network") stage=podnet ;;
      "$dns") stage=coredns ;;
      */etcd:*) stage=etcd ;;
      *) stage=kube ;;
    esac
    image_from kube.Dockerfile "$context" --build-arg "DEBIAN=$DEBIAN_IMAGE" --target "$stage" -t "$name"
  done
  tar -C "$BIN" -c pause | docker import --change 'ENTRYPOINT ["/pause"]' - "$pause"
  docker save -o "$WORK/images.tar" $components "$dns" "$network" "$pause" "$PYTHON_IMAGE"
}

base() {
  local context=$WORK/node name
  mkdir -p "$context"/{bin,manifests}
  cp -r "$KIND/images/base/files" "$context/kind"
  chmod -R u+w "$context/kind"
  cp "$BIN/kube" "$context/bin/"
  for name in kubeadm kubelet kubectl crictl; do ln -s kube "$context/bin/$name"; done
  printf %s "$K8S_VERSION" >"$context/version"
  # the Go constant: a raw string with the image's name spliced in
  awk '/^const defaultCNIManifest = `/ { on = 1; next } /^`$/ { on = 0 } on' \
    "$KIND/pkg/build/nodeimage/const_cni.go" |
    sed "s#\` + kindnetdImage + \`#$network#" >"$context/manifests/default-cni.yaml"
  # no dynamic volumes: the provisioner that kind installs is left out, its class stays
  cat >"$context/manifests/default-storage.yaml" <<'Y'
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: standard
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
Y
  image_from node.Dockerfile "$context" --build-arg "DEBIAN=$DEBIAN_IMAGE" -t "$NODE_BASE"
}

# As `kind build node-image` does: run it, import the images into its containerd, commit.
preload() {
  docker run -d --name "$container" --entrypoint=sleep --security-opt seccomp=unconfined \
    "$NODE_BASE" infinity
  docker exec -i "$container" bash -c '
    containerd >/dev/null 2>&1 & daemon=$!
    for i in $(seq 100); do ctr version >/dev/null 2>&1 && break; sleep .1; done
    ctr -n k8s.io images import --all-platforms --no-unpack --digests - || exit
    kill $daemon; wait $daemon' <"$WORK/images.tar"
  docker commit --change "LABEL $MADE_FROM=$made" \
    --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' "$container" "$NODE_IMAGE"
}

step "images of the control plane" component_images
step "node image without its images" base
step "node image $NODE_IMAGE" preload
docker image prune -f --filter "label=$MADE_FROM" >/dev/null # older ones of ours, unless they run
echo "$NODE_IMAGE"
