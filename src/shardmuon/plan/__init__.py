"""Plans (which rank orthogonalizes which matrix, in which bucket) and each rank's copy lists. Pure."""
