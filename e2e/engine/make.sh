#!/usr/bin/env bash
# The engine's environment: vLLM for CPUs, the copy worker and the small model. Makes what is missing, prints its path.
#
#   ENV=$(e2e/engine/make.sh)
#   PYTHONPATH=$ENV/site-packages:$ENV/testing $(cat $ENV/interpreter) -m vllm.entrypoints.openai.api_server --model $ENV/model ...
#
# It lies outside the clone, in ${KVPOOL_CACHE:-${XDG_CACHE_HOME:-~/.cache}/kvpool}, and may be mounted anywhere, read-only,
# where the same minor version of Python runs. KVPOOL_ENGINE_PYTHON names the interpreter; by default Python 3.11 if there is
# one (Debian 12's, which the cluster tests' pods have), else 3.12 or 3.13.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
usable='import ctypes, ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
for python in "${KVPOOL_ENGINE_PYTHON:-}" /usr/bin/python3.11 python3.11 /usr/bin/python3 python3.12 python3.13 python3; do
  if [ -n "$python" ] && "$python" -c "$usable" 2>/dev/null; then exec "$python" "$here/environment.py"; fi
done
echo "the engine needs Python 3.11, 3.12 or 3.13 with venv (KVPOOL_ENGINE_PYTHON=/path/to/python3.x names it)" >&2
exit 2
