"""Metrics for Prometheus: a view of the figures of `status`, and the endpoint that serves them."""
