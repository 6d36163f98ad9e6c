"""Admission webhook: injects opted-in pods.

::

    server.py             HTTPS, limits, metrics, startup
    self_signed.py        own CA, leaf, caBundle (decisions: kvpool_operator.pki.certificates)
    file_certificates.py  certificate that another component renews
    pool_cache.py         cache of the pools and namespaces
    selector_hooks.py     webhooks for the selectors of pools
    review.py             AdmissionReview request and response; calls kvpool_operator.injection
    explain.py            the same decisions about the pods in a file, without a cluster
    pod_templates.py      pod templates in manifests of any kind

A cache must not prevent pods from starting: in case of doubt the pod is admitted unchanged, with the reason.
"""
