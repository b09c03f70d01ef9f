"""Tools for testing shardmuon, and code that uses shardmuon, on processes that start once and serve many calls."""

from __future__ import annotations

from shardmuon.testing.pool import RankError as RankError
from shardmuon.testing.pool import RankException as RankException
from shardmuon.testing.pool import RankPool as RankPool
