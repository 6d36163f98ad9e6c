"""What the operator has a sidecar do now and then: purge, verify, warm ... Never on a request's path."""
