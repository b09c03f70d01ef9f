"""`shardmuon` command: one module per subcommand, imported only when used. These modules may import anything."""
