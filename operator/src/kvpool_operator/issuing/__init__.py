"""Issues leaf certificates to sidecars, against a token that the kubelet gave their pod."""
