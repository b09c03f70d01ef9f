"""The `shardmuon` command. This package is allowed to import any other part of shardmuon."""
