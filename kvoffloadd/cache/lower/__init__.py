"""Parts that both lower tiers share: requests that wait for keys, and keys that wait to be written."""
