"""What a command does differently in a notebook, where it shows its progress bars and its pictures."""

import sys
from pathlib import Path


def ipython_shell() -> object | None:
    """Returns this process's IPython shell, if it has one."""
    module = sys.modules.get("IPython")
    return module and module.get_ipython()


def is_kernel() -> bool:
    """True if this process prints into a notebook."""
    return getattr(ipython_shell(), "kernel", None) is not None


def has_command_line() -> bool:
    """True if sys.argv is a command's own: a notebook's holds the settings of its kernel."""
    return ipython_shell() is None or hasattr(sys.modules["__main__"], "__file__")  # %run sets __file__


def hides_bars(silent: bool = False) -> bool | None:
    """Returns tqdm's `disable`: bars are shown in a terminal and in a notebook."""
    return silent or (False if is_kernel() else None)


def show(picture: Path) -> None:
    """Shows a picture below the cell that runs."""
    if is_kernel():
        from IPython.display import Image, display

        display(Image(filename=str(picture)))
