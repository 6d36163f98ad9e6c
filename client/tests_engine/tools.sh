#!/usr/bin/env bash
# SGLang compiles its hash when it is first used: see that there is what that needs, with Debian's packages if we may.
set -euo pipefail
python=${KVPOOL_ENGINE_PYTHON:-/usr/bin/python3}
need=()
command -v g++ >/dev/null || need+=(g++)
[ -n "$(find /usr/include -path '*openssl/sha.h' -print -quit 2>/dev/null)" ] || need+=(libssl-dev)
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h" ] || need+=(python3-dev)
[ ${#need[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "test-engines: installing ${need[*]}, with which SGLang compiles its hash" >&2
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${need[@]}" >/dev/null
else
  echo "test-engines: SGLang compiles its hash with ${need[*]}: apt-get install them" >&2
  exit 2
fi
