"""Plans: who orthogonalizes which matrix, in which bucket; and the copy lists of one rank. Pure."""
