"""Bundled options of the concern `model`."""
