"""Metrics for Prometheus: a view of the figures that `status` tells, and where it can be scraped."""
