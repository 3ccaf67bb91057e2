"""Its place makes `tests/` importable: `import reference`."""
