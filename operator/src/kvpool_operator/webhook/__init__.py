"""The admission webhook: turns an opted-in pod into one whose engine reads and writes the pool.

::

    server.py    HTTPS, limits, metrics, start-up        (I/O)
    tls.py       certificate authority, leaf, caBundle   (I/O; the decisions are in kvpool_operator.pki.certificates)
    pools.py     cached view of the pools                (I/O; the choice of a pool is pure)
    review.py    AdmissionReview -> AdmissionReview      (never raises, never denies)
    inject.py    pod -> pod                              (pure)
    command.py   what a container's command line starts  (pure)
    connector.py what the engine is told                 (pure)

A cache must not stop pods: every doubt ends in an admitted, unchanged pod and a sentence that says why.
"""
