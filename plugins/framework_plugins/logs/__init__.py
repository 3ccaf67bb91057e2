"""Bundled options of the concern `logs`."""
