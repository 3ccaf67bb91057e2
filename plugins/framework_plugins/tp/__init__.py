"""Bundled options of the concern `tp`."""
