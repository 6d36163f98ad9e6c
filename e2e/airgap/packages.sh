#!/bin/bash
# Install the Debian packages that making and running a cluster without an image registry needs.
. "$(dirname "$(readlink -f "$0")")/lib.sh"

missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
PATH=$PATH:/usr/sbin:/sbin
need debootstrap debootstrap
if ! docker info >/dev/null 2>&1; then # otherwise a daemon runs already and is used
  for tool in containerd runc iptables; do need "$tool" "$tool"; done
  need dockerd docker-engine
fi
[ ${#missing[@]} -gt 0 ] || exit 0

[ "$(id -u)" = 0 ] || die "these Debian packages are missing and only root can install them: ${missing[*]}"
command -v apt-get >/dev/null || die "without an image registry Debian is needed (missing: ${missing[*]})"
export DEBIAN_FRONTEND=noninteractive
step "Debian package lists" apt-get update -q
# Debian's package of the Docker engine is named docker.SOMETHING, as "docker" alone was taken.
engine=$(apt-cache pkgnames docker. | grep -xE 'docker\.[a-z]+' | head -1)
[ -n "$engine" ] || die "apt knows no package of the Docker engine"
step "Debian packages" apt-get install -y -q --no-install-recommends "${missing[@]/docker-engine/$engine}"
