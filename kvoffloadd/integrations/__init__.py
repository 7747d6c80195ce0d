"""Thin adapters between inference engines and the client library, one package per engine."""
