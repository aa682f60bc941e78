"""`python -m tests.together`: many runs by hand; exit 1 where one fails."""

import argparse
import sys
import time
from collections import Counter

from tests.together.pool import Pool
from tests.together.search import covering, drawn, smallest, tried
from tests.together.space import Case, pairs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.together", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--covering", action="store_true", help="the runs of `make test`, which cover all pairs")
    parser.add_argument("--only", action="append", default=[], metavar="AXIS=VALUE", help="runs with this value alone")
    parser.add_argument("--case", action="append", help="this run, as one was printed")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th run from k on, to share them out")
    parser.add_argument("--whole", action="store_true", help="print failing runs as drawn, don't shrink them")
    parser.add_argument("-v", action="store_true", help="print every run")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    cases = [Case.read(text) for text in given.case or ()]
    cases = cases or (covering(given.seed) if given.covering else list(drawn(given.runs, given.seed)))
    only = dict(text.split("=", 1) for text in given.only)
    cases = [case for case in cases if only.items() <= case.values.items()]
    pool, counts, began, covered = Pool(), Counter[str](), time.monotonic(), set()
    for case in cases[part::parts]:
        result = tried(case, pool)
        counts["failed" if result.fault else "refused" if result.refused else "right"] += 1
        covered |= pairs(case)
        if given.v:
            print("WRONG" if result.fault else result.refused or "right", case, flush=True)
        if result.fault:
            least = case if given.whole else smallest(case, lambda other: bool(tried(other, pool).fault))
            print(f"{tried(least, pool).fault or result.fault}\n    --case '{least}'", flush=True)
    pool.close()
    print(f"{dict(counts)} of {len(cases[part::parts])} runs, {len(covered)} pairs, {time.monotonic() - began:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
