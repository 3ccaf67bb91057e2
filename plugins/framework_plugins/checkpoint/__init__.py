"""Bundled options of the concern `checkpoint`."""
