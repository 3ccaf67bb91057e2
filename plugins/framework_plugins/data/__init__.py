"""Bundled options of the concern `data`."""
