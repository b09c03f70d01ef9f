"""Golden rows: what two trees of this project are compared on bit for bit, and a committed set in exact arithmetic."""
