"""Write `docs/hooks.md` from `framework/hookspecs.py`, so that the page can't say anything else than the code.

python tools/hook_docs.py          # write
python tools/hook_docs.py --check  # exit code 1 if the page is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from framework import hookspecs
from framework.hookspecs import API_VERSION, PROJECT, SPECS

PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"

HEAD = """\
# Hooks

Written by `python tools/hook_docs.py` from `framework/hookspecs.py`; a test holds it up to date. Hook API version
{version}.

A plugin is a dataclass with some of these methods, each marked `@hookimpl` (`from framework import hookimpl`). A method
may take any subset of the arguments, by name. [write_a_plugin.md](write_a_plugin.md) makes one from an empty folder.
"""


def hooks(spec: type) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Yield (name, function, first result only) of each hook of a spec class, in the order of the file."""
    for name, function in vars(spec).items():
        options = getattr(function, f"{PROJECT}_spec", None)
        if options is not None:
            yield name, function, options["firstresult"]


def how(name: str, first: bool) -> str:
    """Return in words how a hook is called."""
    if first:
        return "first result that isn't None"
    if name.startswith("apply_"):
        return "all, in place"
    if name.startswith("on_"):
        return "all, notification"
    return "all, results merged"


def signature(name: str, function: Callable[..., Any]) -> str:
    """Return `name(plan: RunPlan) -> ...`, without `self`."""
    text = inspect.signature(function)
    parameters = [parameter for parameter in text.parameters.values() if parameter.name != "self"]
    return f"{name}{text.replace(parameters=parameters)}".replace("'", "")


def page() -> str:
    """Return the whole page."""
    doc = inspect.getdoc(hookspecs) or ""
    parts = [HEAD.format(version=API_VERSION), "## The whole run\n", _markdown(doc.split("\n\n", 1)[1]), ""]
    for spec in SPECS:
        parts += [f"## {_title(spec.__name__)}\n", f"{inspect.getdoc(spec)}\n"]
        for name, function, first in hooks(spec):
            text = " ".join((inspect.getdoc(function) or "").split())
            parts += [
                f"### `{name}`\n", f"```python\n{signature(name, function)}\n```\n", f"{text}\n",
                f"*{how(name, first)}*\n",
            ]  # fmt: skip
    return "\n".join(parts)


def _title(name: str) -> str:
    return {"ModelSpecs": "Model surgery"}.get(name, re.sub(r"Specs$", "", name))


def _markdown(doc: str) -> str:
    """Turn the literal block after `::` into a fenced one."""
    head, mark, rest = doc.partition("::\n")
    if not mark:
        return doc
    lines = rest.strip("\n").split("\n")
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    block = inspect.cleandoc("\n" + "\n".join(lines[:end])).rstrip()
    return f"{head}:\n\n```\n{block}\n```\n\n" + "\n".join(lines[end:])


def main() -> int:
    """Write or check the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print("docs/hooks.md is out of date. Type `python tools/hook_docs.py`.", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
