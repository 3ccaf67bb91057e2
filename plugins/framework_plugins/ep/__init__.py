"""Bundled options of the concern `ep`."""
