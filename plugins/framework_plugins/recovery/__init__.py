"""Bundled options of the concern `recovery`."""
