"""Bundled options of the concern `compile`."""
