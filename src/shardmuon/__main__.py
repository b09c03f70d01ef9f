"""`python -m shardmuon` is the `shardmuon` command."""

from shardmuon.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
