"""Bundled options of the concern `optimizer`."""
