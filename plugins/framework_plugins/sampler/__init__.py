"""Bundled options of the concern `sampler`."""
