"""Bundled options of the concern `comm`."""
