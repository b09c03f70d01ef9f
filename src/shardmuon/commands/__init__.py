"""The `shardmuon` command. This package may import any other part of shardmuon."""
