"""`helm test`: what the webhook answers to a pod that is not made. The answer is the injection, or why there is none.

Only reachability is tested of TLS: the API server checks the certificate, and the pod of the other test is made by it.
"""

import base64
import json
import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 10.0


def review(namespace, pool):
    """The question that the API server would ask, marked as a dry run."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "kvpool-test-",
            "namespace": namespace,
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": pool or "kvpool-test/none", "kvpool.dev/engine": "none"},
        },
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }
    request = {
        "uid": "kvpool-test",
        "dryRun": True,
        "operation": "CREATE",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": namespace,
        "object": pod,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def ask(url, question):
    context = ssl._create_unverified_context()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(question).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return json.load(answer)["response"]
    except (OSError, ValueError, KeyError) as e:
        sys.exit(f"the webhook gave no answer at {url}: {e}")


def main():
    namespace, pool = os.environ["TEST_NAMESPACE"], os.environ.get("TEST_POOL", "")
    told = ask(os.environ["TEST_URL"], review(namespace, pool))
    changes = json.loads(base64.b64decode(told["patch"])) if "patch" in told else []
    paths = " ".join(change["path"] for change in changes)
    said = "; ".join(told.get("warnings", ["no warning"]))
    if "kvpool.dev~1injected" in paths:
        print(f"dry run: a pod in {namespace} would be injected with pool {pool} ({len(changes)} changes; {said})")
    elif "kvpool.dev~1skip-reason" not in paths:
        sys.exit(f"that is no answer of KVPool's webhook: {told}")
    elif pool:
        sys.exit(f"dry run: a pod in {namespace} would not be injected: {said}")
    else:
        print(f"dry run: the webhook was asked and said: {said}")


if __name__ == "__main__":
    main()
