"""`python -m shardmuon.demo`."""

import sys

from shardmuon.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
