"""Map the two data folders `conf/` and `recipes/` into the wheel as `framework.conf` and `framework.recipes`.

Everything else is in `pyproject.toml`. The mapping keeps the folders visible at the top of the checkout
while an installed wheel puts only `framework` and `framework_plugins` on the import path.
"""

from setuptools import find_namespace_packages, find_packages, setup


def data_packages(folder: str) -> list[str]:
    """Name `folder` and its sub-folders as data packages under `framework`."""
    return [f"framework.{name}" for name in (folder, *(f"{folder}.{sub}" for sub in find_namespace_packages(folder)))]


setup(
    packages=[
        *find_packages(include=["framework", "framework.*"]),
        *find_packages("plugins"),
        *data_packages("conf"),
        *data_packages("recipes"),
    ],
    package_dir={
        "framework_plugins": "plugins/framework_plugins",
        "framework.conf": "conf",
        "framework.recipes": "recipes",
    },
)
