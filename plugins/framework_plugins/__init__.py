"""The bundled options: one folder a concern, one file an option. Reaches the core only through hooks."""
