"""Plans and programs. A plan assigns each matrix to the rank that orthogonalizes it, and to a bucket of matrices that
are exchanged together. A program lists the copies that one rank executes for one bucket. All functions are pure."""
