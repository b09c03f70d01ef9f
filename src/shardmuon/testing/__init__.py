"""Tools for testing shardmuon, or code that uses shardmuon, on ranks that start once and run many functions."""

from __future__ import annotations

from shardmuon.testing.pool import RankError as RankError
from shardmuon.testing.pool import RankException as RankException
from shardmuon.testing.pool import RankPool as RankPool
