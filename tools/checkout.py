"""Which commit runs, for what a command measures or finds."""

from __future__ import annotations

import subprocess

from rocline.tools.bootstrap import ROOT


def commit() -> str | None:
    """Of the checkout that runs, with "+" where it has changes; None for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changes)
