"""The common part of the adapters of several engines. It knows no engine and imports none."""
