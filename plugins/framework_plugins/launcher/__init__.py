"""Bundled options of the concern `launcher`."""
