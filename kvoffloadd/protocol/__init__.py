"""Converts between bytes and typed messages, and checks the order in which both sides send them. No I/O, no clock."""
