"""Bundled options of the concern `cp`."""
