"""The papers' headline numbers on the same work here; without arguments all rows."""

import sys

from common.entry import run
from common.paths import ROOT

sys.path.append(str(ROOT))  # the elastic protocol's virtual clock stands with its tests

if __name__ == "__main__":
    run("papers", "rows")
