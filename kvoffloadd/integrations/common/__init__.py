"""What the adapters of several engines have in common. It knows no engine and imports none."""
