"""Learning from a cluster's own runs: what they say about its factors, why one is slow, which one to run next."""
