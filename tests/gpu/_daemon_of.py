"""`kvoffloadd serve` as another user: all that it needs of files is loaded before root is given up.

python -m tests.gpu._daemon_of UID FOLDER serve ...
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import kvoffloadd
from kvoffloadd import cli
from scripts.gpu.worker import become


def main() -> None:
    """Becomes that user, then what `kvoffloadd` is."""
    for module in pkgutil.walk_packages(kvoffloadd.__path__, "kvoffloadd."):
        if not module.name.endswith("__main__") and ".integrations." not in module.name:
            importlib.import_module(module.name)
    uid = int(sys.argv.pop(1))
    os.chown(sys.argv.pop(1), uid, uid)
    become(uid)
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
