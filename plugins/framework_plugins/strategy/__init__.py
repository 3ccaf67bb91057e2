"""Bundled options of the concern `strategy`."""
