"""What the webhook counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["WebhookMetrics"]


class WebhookMetrics:
    """One registry per server, so that two servers in one process do not share counts. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "kvpool_webhook_reviews",
            "Admission reviews answered, by outcome: injected, unchanged, ignored, or the reason for a skip.",
            ["outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvpool_webhook_review_seconds",
            "Time from the first byte of the request to the response.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=self.registry,
        )
        self.pools = Gauge("kvpool_webhook_pools", "KVCachePools in the cache.", registry=self.registry)
        self.view_age = Gauge(
            "kvpool_webhook_pool_view_age_seconds", "Seconds since the pools were listed.", registry=self.registry
        )
        self.certificate_expires = Gauge(
            "kvpool_webhook_certificate_expiry_timestamp_seconds",
            "Expiry of the certificate of this replica, in seconds since 1970.",
            registry=self.registry,
        )
        self.authority_expires = Gauge(
            "kvpool_webhook_authority_expiry_timestamp_seconds",
            "Expiry of the webhook's own CA, in seconds since 1970; 0 if another CA signs.",
            registry=self.registry,
        )
