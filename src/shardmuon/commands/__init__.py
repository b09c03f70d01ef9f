"""The `shardmuon` command, which may import any other part of the package."""
