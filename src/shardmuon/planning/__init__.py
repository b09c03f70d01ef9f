"""What a step will do, as pure data: which rank holds which piece (`layout`), who orthogonalizes what, by which route,
in which bucket (`plan`, `routes`, `balance`). Equal on all ranks, and runs without any. Imports nothing of ours.
"""
