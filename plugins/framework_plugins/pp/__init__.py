"""Bundled options of the concern `pp`."""
