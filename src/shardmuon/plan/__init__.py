"""Plans, which assign each matrix to a rank that orthogonalizes it and to a bucket of matrices that are exchanged
together, and the list of copies that each rank executes. Pure functions."""
