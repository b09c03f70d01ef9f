"""The `shardmuon` command: one module for each subcommand, imported when it is asked for. May import anything."""
