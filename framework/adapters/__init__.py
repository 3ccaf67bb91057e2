"""The only places that touch private names of torch and Lightning; each is watched by a test of `tests/contract`."""
