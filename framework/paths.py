"""Where the YAML catalogue lies: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def conf_dir() -> Path:
    """Folder of `train.yaml` and of the bundled options."""
    return _data_dir("conf")


def recipes_dir() -> Path:
    """Folder of the bundled recipes."""
    return _data_dir("recipes")


def _data_dir(name: str) -> Path:
    """Find `name` in the package (a wheel) or next to it (a checkout).

    Raises:
        FileNotFoundError: neither is there, so the installation is broken.
    """
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"The folder {name!r} is neither in {_PACKAGE} nor beside it: reinstall the package")
