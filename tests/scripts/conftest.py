"""Scripts are no package: they find their siblings in their own folder, and so must tests of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))
