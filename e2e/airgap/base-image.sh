#!/bin/bash
# Make kvpool-local/python:3.11, the base of our images and the image of engine pods.
# base-image.sh: on a Debian made here from packages.
# base-image.sh IMAGE: on that image (where a registry can be reached).
. "$(dirname "$(readlink -f "$0")")/lib.sh"

# A minimal Debian from its packages alone.
debian() {
  local root=$KEEP/debian.partial mirror
  rm -rf "$root"
  # the machine's own mirror, if it has one of this release; else debootstrap's default
  mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $SUITE" 2>/dev/null | head -1)
  debootstrap --variant=minbase "$SUITE" "$root" $mirror
  # every byte is copied and unpacked on three nodes: leave out what nobody reads, now and in later layers
  cat >"$root/etc/dpkg/dpkg.cfg.d/small" <<'D'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
D
  find "$root/usr/share/doc" -type f ! -name copyright -delete
  rm -rf "$root"/usr/share/{man,info,locale}/* "$root"/var/{cache/apt,lib/apt/lists}/* "$root"/var/log/*.log
  tar -C "$root" -c . | docker import --change 'CMD ["/bin/bash"]' \
    --change "LABEL $MADE_FROM=$(hash <"$0")" - "$DEBIAN_IMAGE"
  rm -rf "$root"
}

lock
from=${1:-$DEBIAN_IMAGE}
if [ "$from" = "$DEBIAN_IMAGE" ] && [ "$(made_from "$DEBIAN_IMAGE")" != "$(hash <"$0")" ]; then
  command -v debootstrap >/dev/null || PATH=$PATH:/usr/sbin
  [ "$(id -u)" = 0 ] || die "making a Debian image from packages needs root"
  step "minimal Debian ($SUITE)" debian
fi
docker image inspect "$from" >/dev/null 2>&1 || step "pulling $from" docker pull -q "$from"
made=$({ cat "$AIRGAP/images/python.Dockerfile"; image_id "$from"; } | hash)
[ "$(made_from "$PYTHON_IMAGE")" = "$made" ] || step "image $PYTHON_IMAGE" \
  image_from python.Dockerfile "$AIRGAP/images" \
  --build-arg "DEBIAN=$from" --label "$MADE_FROM=$made" -t "$PYTHON_IMAGE"
