"""Entry point of `python -m shardmuon`, which runs the `shardmuon` command."""

from shardmuon.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
