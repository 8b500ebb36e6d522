"""What a command does otherwise in a notebook: its bars are shown, and its pictures are shown."""

import sys
from pathlib import Path


def shell() -> object | None:
    """Returns IPython's shell where this process has one."""
    module = sys.modules.get("IPython")
    return module and module.get_ipython()


def is_kernel() -> bool:
    """True if what is printed here is shown in a notebook."""
    return getattr(shell(), "kernel", None) is not None


def has_command_line() -> bool:
    """True if sys.argv is a command's own: a notebook's holds the settings of its kernel."""
    return shell() is None or hasattr(sys.modules["__main__"], "__file__")  # as %run has it


def hides_bars(silent: bool = False) -> bool | None:
    """Returns tqdm's `disable`: bars are shown in a terminal and in a notebook."""
    return silent or (False if is_kernel() else None)


def show(picture: Path) -> None:
    """Shows a picture below the cell that runs."""
    if is_kernel():
        from IPython.display import Image, display

        display(Image(filename=str(picture)))
