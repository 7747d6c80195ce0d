"""Builds the packages that users install, checks them, and makes a release."""
