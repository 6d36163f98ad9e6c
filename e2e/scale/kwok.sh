#!/bin/bash
# Build kwok from its Go module (go.mod, go.sum here): prints the path of the binary.
. "$(dirname "$(readlink -f "$0")")/../airgap/lib.sh"
cd "$AIRGAP/../scale"
bin=$KEEP/kwok-$(cat go.mod go.sum | hash)
if [ ! -x "$bin" ]; then
  lock
  command -v go >/dev/null || die "building kwok needs Go 1.24 or newer"
  step "building kwok" go build -trimpath -ldflags "-s -w" -o "$bin.partial" sigs.k8s.io/kwok/cmd/kwok
  mv "$bin.partial" "$bin"
fi
echo "$bin"
