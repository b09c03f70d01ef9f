"""The `shardmuon` command, with one module per subcommand. A module is imported only when its subcommand is used, so it
may import any other part of the package."""
