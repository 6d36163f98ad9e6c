"""Operations that the operator starts on a sidecar: purge, verify, warm and others. Never on a request's path."""
