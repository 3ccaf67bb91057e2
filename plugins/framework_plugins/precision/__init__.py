"""Bundled options of the concern `precision`."""
