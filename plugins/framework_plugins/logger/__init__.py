"""Bundled options of the concern `logger`."""
