"""Commands of Python processes of ours. `python -m` and `python -c` import from the current folder, which may be a
stranger's model with a json.py in it; `-P` against that came with Python 3.11.
"""

from __future__ import annotations

import sys

# The first line of a program: only built-in modules are imported while '' is on the path.
NO_CURRENT_FOLDER = "import sys; sys.path[:] = [each for each in sys.path if each]\n"
_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does, but imports nothing from the current folder."""
    return [sys.executable, "-c", NO_CURRENT_FOLDER + _MODULE, module, *arguments]
