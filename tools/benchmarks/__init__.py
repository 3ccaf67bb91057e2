"""The measurements behind `tools/bench.py`, one module each; importable, so that ranks can run their functions."""
