"""Bundled options of the concern `activation`."""
