"""Bytes <-> typed messages, and who may say what when. No I/O, no clock."""
