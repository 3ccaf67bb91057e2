"""Run a command on a terminal of its own and draw what stands on it at the end.

python tools/screenshot.py docs/images/terminal.svg --columns 96 -- python -m framework +strategy=fsdp +pp=gpipe
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\r|\n|\x08")


def run(command: Sequence[str], columns: int, rows: int) -> tuple[str, int]:
    """Run `command` on a pseudo-terminal; return everything it wrote, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says EIO when the last process has closed the terminal
            break
        if not piece:
            break
        written += piece
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    os.close(ours)
    return written.decode(errors="replace"), process.wait()


def screen(written: str) -> str:
    """Return the lines on the terminal after `written`, with their colours.

    Knows what progress bars use: carriage return, cursor up, erase line. Lines that scrolled off are kept.
    """
    lines: list[str] = [""]
    at, fresh = 0, False  # the current line; whether the next text replaces it
    position = 0
    for found in CONTROL.finditer(written):
        text = written[position : found.start()]
        position = found.end()
        if text:
            lines[at] = text if fresh else lines[at] + text
            fresh = False
        code = found.group(0)
        if code == "\r":
            fresh = True
        elif code == "\n":
            at, fresh = at + 1, False
            if at == len(lines):
                lines.append("")
        elif found.group(2) == "A":
            at = max(0, at - int(found.group(1) or 1))
        elif found.group(2) == "K":
            lines[at], fresh = "", False
        elif found.group(2) == "m":
            lines[at] = code if fresh else lines[at] + code
            fresh = False
    lines[at] += written[position:]
    return "\n".join(lines).rstrip()


def draw(command: str, text: str, columns: int, title: str) -> str:
    """Return an SVG of a terminal window with prompt, command and `text`; it loads nothing from elsewhere."""
    console = Console(record=True, width=columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "DejaVu Sans Mono")


def main() -> None:
    """Parse the command line, run, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG to write")
    parser.add_argument("--columns", type=int, default=96)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--title", default="framework")
    parser.add_argument("command", nargs="+", help="after --")
    arguments = parser.parse_args()
    written, code = run(arguments.command, arguments.columns, arguments.rows)
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    command = re.sub(r"^\S*/python\S*", "python", shlex.join(arguments.command))
    arguments.picture.write_text(draw(command, screen(written), arguments.columns, arguments.title))
    sys.exit(code)


if __name__ == "__main__":
    main()
